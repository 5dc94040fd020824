"""What is known of an Arm processor, and what the compiler is told of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeq.errors import UnsupportedError
from edgeq.system import machine
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.jit import processor

PI4 = frozenset({"asimd"})
PI5 = frozenset({"asimd", "dotprod", "fp16", "lse", "rdm"})


def test_a_generic_processor_gets_a_name_by_its_features() -> None:
    assert processor.settings(PI5, "generic") == ("cortex-a76", "+neon,+lse,+fullfp16,+rdm,+dotprod,-i8mm")
    assert processor.settings(PI4, "generic") == ("cortex-a72", "+neon,-lse,-fullfp16,-rdm,-dotprod,-i8mm")


def test_a_known_processor_keeps_its_name_but_not_features_that_the_kernel_denies() -> None:
    assert processor.settings(PI5 - {"lse"}, "cortex-a78ae") == ("cortex-a78ae", "+neon,-lse,+fullfp16,+rdm,+dotprod,-i8mm")


@pytest.mark.parametrize("features, name", [(PI4, "neon"), (PI5, "neon-dotprod"), (PI5 | {"i8mm"}, "neon-i8mm")])
def test_the_instruction_set_follows_the_features(features: frozenset[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("board", "aarch64", features, 4))
    isa, reason = choose()
    assert isa.name == name
    assert (
        reason
        == {
            "neon": "no neon-i8mm: the processor lacks dotprod, i8mm; no neon-dotprod: the processor lacks dotprod",
            "neon-dotprod": "no neon-i8mm: the processor lacks i8mm",
            "neon-i8mm": "the best this processor has",
        }[name]
    )


def _library(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., int]) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: SimpleNamespace(**functions))


@pytest.mark.parametrize("found, features", [({16: 1 << 1, 26: 0}, PI4), ({16: 0x101502, 26: 1 << 13}, PI5 | {"i8mm"})])
def test_linux_says_what_all_cores_have(
    found: dict[int, int], features: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    _library(monkeypatch, getauxval=lambda kind: found[kind])
    assert machine._arm_features() == features


@pytest.mark.parametrize("known, value", [(True, 1), (True, 0), (False, 1)])
def test_macos_is_asked_for_what_only_later_processors_have(known: bool, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def sysctlbyname(name: bytes, to: Any, *rest: Any) -> int:
        assert name == b"hw.optional.arm.FEAT_I8MM"
        to._obj.value = value if known else 0
        return 0 if known else -1

    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    _library(monkeypatch, sysctlbyname=sysctlbyname)
    assert machine._arm_features() == (PI5 | {"i8mm"} if known and value else PI5)


def test_asking_a_cortex_a72_for_dot_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("board", "aarch64", PI4, 4))
    with pytest.raises(UnsupportedError, match="neon-dotprod needs dotprod, which this processor does not have"):
        choose("neon-dotprod")


def test_what_the_user_told_numba_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("board", "aarch64", PI4, 4))
    assert processor.here().settings.flags == "+neon,-lse,-fullfp16,-rdm,-dotprod,-i8mm"
    monkeypatch.setenv("NUMBA_CPU_NAME", "cortex-a53")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+neon")
    assert processor.here().settings[1:] == ("cortex-a53", "+neon")


def _processors(folder: Path, file: str, values: dict[int, str]) -> Path:
    for core, text in values.items():
        path = folder / f"cpu{core}" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_big_cores_are_those_of_the_fastest_kind(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5}, raising=False)
    cpus = _processors(tmp_path, file, {0: "446\n", 1: "446\n", 2: "446\n", 3: "446\n", 4: "1024\n", 5: "1000\n", 6: "2048\n"})
    # Processor 6 is faster, but not this process's.
    assert machine.big_cores(cpus) == [4, 5]


def test_without_word_from_the_kernel_all_cores_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.big_cores(_processors(tmp_path, "cpu_capacity", {0: "", 1: "?"})) == []
    monkeypatch.setattr(machine, "big_cores", list)
    assert machine.Cpu("board", "aarch64", PI4, 4).big_cores == 4
