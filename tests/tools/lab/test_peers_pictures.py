"""The comparison of pictures: its rounds with workers of its own, its ratios, its table, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from edgeq.tools.lab.peers import pictures
from edgeq.tools.lab.peers.__main__ import main
from edgeq.tools.lab.peers.contest import PeerError
from edgeq.tools.lab.peers.pictures import PictureContest, PictureLine, Seconds, cells


def test_rounds_go_in_turns_and_a_peer_that_fails_is_shown(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    class Worker:
        def __init__(self, peer: str) -> None:
            self.peer = peer

        def ask(self, do: str, **request: Any) -> Any:
            asked.append((self.peer, do))
            if do == "version_pictures" and self.peer == "llama.cpp":
                raise PeerError("ModuleNotFoundError")
            if do == "see" and self.peer == "openvino":
                raise PeerError("died")
            return {"tower": 0.5, "processor": 0.6, "first": 1.0} if do == "see" else "text"

    @contextmanager
    def process(python: str) -> Iterator[Worker]:
        yield Worker(python)

    for peer in ("checkpoint", *pictures.PEERS):
        (tmp_path / f"qwen2-vl-tiny-2-{peer}").mkdir()
        (tmp_path / f"qwen2-vl-tiny-2-{peer}" / "built").touch()
    contest = PictureContest(
        tmp_path, "qwen2-vl-tiny", 2, [(56, 56), (84, 56)], process, lambda peer: peer, lambda *_: None, PeerError
    )
    lines = contest.run(list(pictures.PEERS), 1, 3)
    assert contest.left_out == {"llama.cpp": "ModuleNotFoundError"} and contest.versions.keys() == {"edgeq", "openvino"}
    assert [(line.peer, line.size, line.failure) for line in lines] == [
        ("edgeq", (56, 56), None), ("openvino", (56, 56), "died"), ("edgeq", (84, 56), None), ("openvino", (84, 56), "died"),
    ]  # fmt: skip
    assert [len(line.seconds) for line in lines] == [3, 0, 3, 0]
    # A run to warm up, then the one that counts; who failed is not asked again.
    assert asked.count(("edgeq", "see")) == 12 and asked.count(("openvino", "see")) == 2


def test_ratios_are_of_the_same_round() -> None:
    mine, other = PictureLine("edgeq", (448, 448), 1), PictureLine("openvino", (448, 448), 1)
    mine.seconds = [Seconds(1.0, 1.5, 2.0), Seconds(10.0, 15.0, 20.0), Seconds(2.0, 3.0, 4.0)]
    other.seconds = [Seconds(2.0, 3.0, None), Seconds(15.0, 30.0, None), Seconds(6.0, 6.0, None)]
    found = cells([mine, other])
    assert found[1] == [
        "edgeq",
        "448 x 448",
        "1",
        "2,000 ms [1,000–10,000]",
        "",
        "3,000 ms [1,500–15,000]",
        "",
        "4,000 ms [2,000–20,000]",
        "",
    ]
    assert found[2][3:] == [
        "6,000 ms [2,000–15,000]",
        "2.00× [1.50–3.00]",
        "6,000 ms [3,000–30,000]",
        "2.00× [2.00–2.00]",
        "",
        "",
    ]


def test_what_cannot_be_compared_is_refused() -> None:
    for arguments, said in (
        (["--image", "448x450"], "multiples of 28"),
        (["--image", "448x448", "--shape", "tiny"], "reads text alone"),
        (["--shape", "qwen2-vl-tiny"], "measured with --image"),
        (["--image", "448x448", "--json"], "leave it out"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code and said in result.output, arguments
