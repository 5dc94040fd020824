"""The corpus, device profiles, what the tables compute, and how compilation is reported."""

from __future__ import annotations

import pytest

from edgeq.devices import DEVICES, device
from edgeq.errors import InputError
from edgeq.tools import bench, corpus


def test_the_digest_names_the_text() -> None:
    assert corpus.digest(["a", "b"]) != corpus.digest(["ab"]) != corpus.digest(["a", "c"])


def test_every_device_is_plausible() -> None:
    for name, profile in DEVICES.items():
        assert device(name) is profile and profile.usable_memory < profile.memory
        assert 4e9 < profile.usable_bandwidth <= profile.bandwidth
    assert device("raspberry-pi-5").ceiling(763_000_000) == pytest.approx(18.1, abs=0.1)
    with pytest.raises(InputError, match="'pi' is not known; choose one of raspberry-pi-4"):
        device("pi")


def test_a_sliding_window_reads_fewer_positions() -> None:
    from edgeq.config import ModelConfig, Rope

    config = ModelConfig("mistral", 64, 32, 48, 2, 2, 1, 16, 1e-5, Rope(1e4), 128, True, sliding_windows=(8, 0))
    assert config.positions_read(4) == 4 and config.positions_read(20) == (8 + 20) / 2


def test_rows_of_the_benchmark_are_named_as_llama_bench_names_them() -> None:
    assert bench.Test("pp", 512, 0).name == "pp512" and bench.Test("tg", 128, 512).name == "tg128 @ d512"


def test_compiling_is_told_in_two_lines_where_nobody_watches_and_not_at_all_when_nothing_is_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from edgeq.tools.terminal import compilation

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
