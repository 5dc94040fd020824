"""Kernels of processors in packs: what is taken, and what is refused before anything of it is kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import InputError
from edgeq.format import kernel_pack
from edgeq.format.container import ModelFile
from edgeq.format.embedded_kernels import embed
from edgeq.format.kernel_pack import KernelSet, StoredKernel
from edgeq.format.writer import Writer
from edgeq.system import machine
from edgeq.system.devices import DEVICES
from edgeq.targets import kernel_packs
from edgeq.targets.cpu.ahead import compiled
from edgeq.targets.cpu.jit import compile, packed, pipeline, processor
from edgeq.targets.cpu.jit.args import RECORD_SLOTS
from edgeq.targets.cpu.jit.processor import of_device
from edgeq.targets.cpu.kernels.rows.norms import ScaleArgs, scale
from edgeq.targets.cpu.threads.threadpool import ThreadPool
from tests.edgeq.format.sample_file import write_body

NAME = "norms-scale"


@pytest.fixture(scope="module")
def made() -> KernelSet:
    """One kernel for a device that is like this machine."""
    cpu = machine.cpu()
    for device in DEVICES.values():
        if device.supported and of_device(device).arch == cpu.arch and of_device(device).features <= cpu.features:
            return compiled([(scale, ())], device)
    pytest.skip("this processor runs the kernels of no device")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    """A model file, and a cache folder of its own."""
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(compile, "cache_folder", lambda: tmp_path / "cache" / "kernels")
    compile.address.cache_clear()
    writer = Writer(tmp_path / "model.edgeq")
    return writer.finish(write_body(writer))


def put_beside(model: ModelFile, *sets: KernelSet) -> None:
    kernel_pack.beside(model.path).write_bytes(kernel_pack.encode(sets))


def test_what_was_compiled_elsewhere_runs_once_it_is_trusted(
    made: KernelSet, model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_beside(model, made)
    with caplog.at_level(logging.WARNING):
        assert packed.install(model) == 0
    assert "made elsewhere" in caplog.text and "pass --trust-kernels" in caplog.text and not (tmp_path / "cache").exists()
    (told,) = packed.facts(model)
    assert told.refused and "made elsewhere" in told.refused and told.archs == {made.arch: 1}
    kernel_packs.accept(model)
    assert packed.facts(model)[0].refused is None and packed.install(model) == 1 and packed.install(model) == 0
    monkeypatch.setattr(pipeline, "compiled", None)
    x, count = np.arange(32, dtype=np.float32).reshape(2, 16), np.array([2], np.int64)
    args = ScaleArgs(
        rows=count.ctypes.data, x=x.ctypes.data, x_stride=64, width=16, factor=0.5, out=x.ctypes.data, out_stride=64
    )
    place = compile.address(scale)
    monkeypatch.undo()
    ThreadPool(1, 1, RECORD_SLOTS).run(np.array([args.record(place)], np.int64), 1)
    assert np.array_equal(x.ravel(), np.arange(32) / 2)


def test_kernels_inside_the_file_are_taken_too(made: KernelSet, model: ModelFile) -> None:
    file = embed(model, {made.arch: kernel_pack.encode([made])}, model.path)
    kernel_packs.accept(file)
    assert packed.install(file) == 1


def test_what_is_there_already_is_not_asked_about(
    made: KernelSet, model: ModelFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_beside(model, made)
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    (tmp_path / "cache" / "kernels" / f"{NAME}.o").write_bytes(b"what this machine compiled")
    assert packed.install(model) == 0 and not caplog.text
    assert (tmp_path / "cache" / "kernels" / f"{NAME}.o").read_bytes() == b"what this machine compiled"


def test_machine_code_calls_nothing_of_python(made: KernelSet) -> None:
    """So it does not matter which Python compiled it."""
    heads = [json.loads(kernel.pieces[0].split(b"\n")[0]) for kernel in made.kernels.values()]
    assert heads and not any(name.startswith(("Py", "_Py", "NRT", "numba")) for head in heads for name in head["needs"])


def with_kernels(*names: str, pieces: tuple[bytes, ...] = (b"code",)) -> Callable[[KernelSet], KernelSet]:
    return lambda made: replace(made, kernels={name: StoredKernel(None, pieces) for name in names})


REFUSED: dict[str, tuple[Callable[[KernelSet], KernelSet], str]] = {
    "other sources": (lambda made: replace(made, sources="0" * 16), "install the same versions here and there"),
    "an unknown processor": (lambda made: replace(made, arch="sve9"), "another version of edgeq"),
    "no hyphen": (with_kernels("elementwise"), "elementwise is no kernel of a processor"),
    "an endless name": (with_kernels("a-" + "b" * 60), "no kernel of a processor"),
    "a large kernel": (with_kernels("a-b", pieces=(bytes(packed.MAX_KERNEL_BYTES + 1),)), "no kernel of a processor"),
    "two pieces": (with_kernels("a-b", pieces=(b"1", b"2")), "no kernel of a processor"),
    "no piece": (with_kernels("a-b", pieces=()), "no kernel of a processor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_kernels_are_not_installed_even_if_trusted(what: str, made: KernelSet, model: ModelFile, tmp_path: Path) -> None:
    change, message = REFUSED[what]
    put_beside(model, change(made))
    kernel_packs.accept(model)
    assert packed.install(model) == 0 and not (tmp_path / "cache" / "kernels").exists()
    assert message in str(packed.facts(model)[0].refused)


def test_kernels_of_another_processor_are_told_and_not_installed(
    made: KernelSet, model: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_beside(model, made)
    kernel_packs.accept(model)
    wanted = processor.of_isa(made.arch)
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("any", "riscv64", frozenset(), 2))
    assert packed.install(model) == 0
    assert f"kernels for {made.arch} ({wanted.arch}); this processor is riscv64" in str(packed.facts(model)[0].refused)
    lacking = sorted(wanted.features)[0]
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("any", wanted.arch, wanted.features - {lacking}, 2))
    assert packed.install(model) == 0
    assert f"this processor lacks {lacking}" in str(packed.facts(model)[0].refused)


def test_the_set_that_uses_most_of_the_processor_is_installed(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = processor.of_isa("avx512-vnni")
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("any", best.arch, best.features, 2))
    sets = [
        KernelSet("cpu", isa, compile.source_digest(), {}, {NAME: StoredKernel(None, (isa.encode(),))})
        for isa in ("avx2", "avx512-vnni")
    ]
    put_beside(model, *sets)
    kernel_packs.accept(model)
    assert packed.install(model) == 1
    assert (tmp_path / "cache" / "kernels" / f"{NAME}.o").read_bytes() == b"avx512-vnni"


def test_a_damaged_pack_installs_nothing(made: KernelSet, model: ModelFile, tmp_path: Path) -> None:
    path = kernel_pack.beside(model.path)
    path.write_bytes(kernel_pack.encode([made])[:-1])
    with pytest.raises(InputError, match="truncated or hostile"):
        kernel_packs.accept(model)
    assert packed.install(model) == 0 and packed.facts(model) == [] and not (tmp_path / "cache").exists()


def test_kernels_are_for_processors_not_for_gpus() -> None:
    with pytest.raises(
        InputError, match="computes on a GPU .sm_89.; kernels are compiled for neon, neon-dotprod, neon-i8mm, avx2, avx-vnni"
    ):
        of_device(DEVICES["rtx-4090"])
