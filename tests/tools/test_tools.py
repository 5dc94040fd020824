"""The corpus, device profiles, what the tables compute, and how compilation is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgeq.errors import InputError
from edgeq.system import machine
from edgeq.system.devices import DEVICES, device
from edgeq.tools.commands import bench
from edgeq.tools.measure import report
from edgeq.tools.quality import corpus


def test_the_digest_names_the_text() -> None:
    assert corpus.digest(["a", "b"]) != corpus.digest(["ab"]) != corpus.digest(["a", "c"])


def test_every_device_is_plausible() -> None:
    for name, profile in DEVICES.items():
        assert device(name) is profile and profile.usable_memory < profile.memory
        assert 4e9 < profile.usable_bandwidth <= profile.bandwidth
    assert device("raspberry-pi-5").ceiling(763_000_000) == pytest.approx(18.1, abs=0.1)
    with pytest.raises(InputError, match="'pi' is not known; choose one of raspberry-pi-4"):
        device("pi")


@pytest.mark.parametrize(
    ("reached", "cache", "measured", "shown"),
    [
        (10.6, 999, [10.0, 12.0], 12.0),  # faster than memory, from memory: measured again
        (10.6, 999, [10.0, 9.0], 10.0),
        (10.5, 999, [10.0], 10.0),
        (10.6, 1000, [10.0], 10.0),  # the model fits the cache
        (10.6, None, [10.0], 10.0),
        (10.6, 999, [None], None),
    ],
)
def test_a_bandwidth_that_a_model_exceeds_is_measured_again(
    reached: float, cache: int | None, measured: list[float | None], shown: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed = []

    def probe(refresh: bool) -> float | None:
        refreshed.append(refresh)
        return measured[len(refreshed) - 1]

    monkeypatch.setattr(machine, "last_level_cache", lambda: cache)
    model: Any = SimpleNamespace(
        weight_bytes=1000, program=SimpleNamespace(read_bandwidth=lambda refresh=False: probe(refresh))
    )
    assert report.read_bandwidth(model, reached=reached) == shown and refreshed == [False, True][: len(measured)]


def test_a_sliding_window_reads_fewer_positions() -> None:
    from edgeq.network.config import ModelConfig
    from edgeq.network.rope import Rope

    config = ModelConfig(
        model_type="mistral",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=Rope(1e4),
        max_position_embeddings=128,
        tie_word_embeddings=True,
        sliding_windows=(8, 0),
    )
    assert config.positions_read(4) == 4 and config.positions_read(20) == (8 + 20) / 2


def test_rows_of_the_benchmark_are_named_as_llama_bench_names_them() -> None:
    assert bench.Test("pp", 512, 0).name == "pp512" and bench.Test("tg", 128, 512).name == "tg128 @ d512"


def test_compiling_is_told_in_two_lines_where_nobody_watches_and_not_at_all_when_nothing_is_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from edgeq.tools.cli.terminal import compilation

    with compilation():
        pass
    assert capsys.readouterr() == ("", "")
    with compilation() as report:
        for done in range(4):
            report(done, 3, "compiling norm")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and len(lines) == 2 and lines[0] == "compiling 3 kernels, once on this machine ..."
    assert lines[1].startswith("kernels compiled in ") and lines[1].endswith(" s")
    with compilation() as report:
        report(0, 0, "measuring what is fastest")
        report(0, 0, "measuring what is fastest")
    assert capsys.readouterr().err == "measuring what is fastest, once on this machine ...\n"
    with compilation() as report:
        report(0, 1, "compiling norm")
    assert capsys.readouterr().err.startswith("compiling 1 kernel, once")
    with compilation("raspberry-pi-5") as report:
        report(0, 2, "compiling norm")
    assert capsys.readouterr().err.startswith("compiling 2 kernels for raspberry-pi-5 ...\n")
