"""The comparison of single products: edgeq's on the emulated device, those of others by stand-ins."""

from __future__ import annotations

import json
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner

from edgeq.tools.lab.products import __main__ as products
from edgeq.tools.lab.products import contestants
from edgeq.tools.lab.products.by_edgeq import CODEC, Edgeq
from edgeq.tools.lab.products.contestants import OTHERS, Prepared
from tests.cuda.emulated import EmulatedDevice

pytestmark = [pytest.mark.cuda]


class Matrices:
    def __init__(self, rows: int, columns: int, copies: int) -> None:
        self.nbytes, self.copies = 2 * rows * columns, copies

    def seconds(self, tokens: int, calls: int, repetitions: int) -> list[float]:
        if tokens == 3:
            raise RuntimeError("no kernel for 3 rows")
        assert calls >= max(products.CALLS, self.copies)
        # One matrix is kept by a cache.
        return [(1e-6 if self.copies == 1 else 4e-6) * (1 + tokens / 100)] * repetitions


class StandIn:
    def __init__(self, name: str, refused: str | None = None) -> None:
        self.name, self.refused = name, refused
        self.copies = list[int]()

    def refusal(self) -> str | None:
        return self.refused

    def prepare(self, rows: int, columns: int, copies: int, most_tokens: int) -> Prepared:
        if rows == 128:
            raise ValueError("too small")
        self.copies.append(copies)
        return Matrices(rows, columns, copies)


def test_each_is_measured_beyond_the_cache_and_within() -> None:
    one, failures = StandIn("one"), list[tuple[str, str]]()
    lines = products.compete([one, StandIn("two")], (256, 512), (1, 3), 3, 1 << 20, lambda *why: failures.append(why))
    assert one.copies == [1, 4, 1]
    assert [(line.name, line.tokens, line.cached) for line in lines] == [
        ("one", 1, False), ("two", 1, False), ("one", 1, True), ("two", 1, True),
    ]  # fmt: skip
    assert lines[0].seconds.median == pytest.approx(4.04e-6) and lines[2].seconds.median == pytest.approx(1.01e-6)
    assert lines[0].bytes_per_s == pytest.approx(2 * 256 * 512 / 4.04e-6)
    assert lines[0].operations_per_s == pytest.approx(2 * 256 * 512 / 4.04e-6)
    assert ("one", "256x512, 3 rows: RuntimeError: no kernel for 3 rows") in failures
    assert not products.compete([one], (128, 128), (1,), 1, failed=lambda *why: failures.append(why))
    assert failures[-1] == ("one", "128x128: ValueError: too small")


def test_those_that_are_absent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "Edgeq", lambda mode: StandIn(f"edgeq {mode}", "there is no\n GPU" if mode == "a8" else None))
    monkeypatch.setattr(products, "OTHERS", (StandIn("other", "not installed"),))
    arguments = ["--shapes", "256x512", "--rows", "1,2", "-r", "2"]
    shown = CliRunner().invoke(products.main, arguments)
    assert shown.exit_code == 0, shown.output
    assert "| edgeq a16 | 256x512 | 2 " in " ".join(shown.stdout.split()) and "beyond" in shown.stdout
    assert "- edgeq a8: there is no GPU" in shown.stdout and "- other: not installed" in shown.stdout
    found = json.loads(CliRunner().invoke(products.main, [*arguments, "--json"]).stdout)
    assert len(found["lines"]) == 4 and found["left_out"].keys() == {"edgeq a8", "other"}
    refused = CliRunner().invoke(products.main, ["--shapes", "100x200"])
    assert refused.exit_code and "multiples of 128" in refused.output


def test_without_a_gpu_torch_and_humming_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert all("no GPU here" in str(each.refusal()) for each in OTHERS)


def test_the_time_of_torch_is_not_that_of_starting_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host starts the graph that is timed while the GPU is still at the same one."""
    torch = MagicMock()
    torch.cuda.Event().elapsed_time.return_value = 8.0
    monkeypatch.setattr(contestants, "import_module", lambda name: torch)
    assert contestants._Torch([lambda x: x], 128, 1).seconds(1, 16, 1) == [0.0005]
    order = [name.rpartition(".")[2] for name, *_ in torch.mock_calls if name.startswith(("cuda.CUDAGraph()", "cuda.Event()."))]
    assert order == ["replay", "record", "replay", "record", "synchronize", "elapsed_time"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("needs_emulator", "needs_generator")
def test_products_of_edgeq_are_timed_by_the_device() -> None:
    device = EmulatedDevice()
    contestant = Edgeq("a16", device)
    assert contestant.refusal() is None
    prepared = contestant.prepare(32, 256, 3, 20)
    assert prepared.nbytes == CODEC.nbytes(32, 256)
    for tokens, kernel, calls in ((2, "fused_rows", 6), (20, "matmul", 6)):
        device.launches.clear()
        found = prepared.seconds(tokens, 4, 1)
        assert len(found) == 1 and found[0] > 0
        # A run to begin with, then two rounds over three matrices.
        assert sum(n for name, n in device.launches.items() if name.startswith(kernel)) == 3 + calls
