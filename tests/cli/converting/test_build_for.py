"""`edgeq build --for` of processors: one pack for several devices, taken where its user trusts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import InputError
from edgeq.format import kernel_pack
from edgeq.format.container import ModelFile
from edgeq.format.kernel_pack import KernelSet, StoredKernel
from edgeq.system import machine
from edgeq.targets.cpu import ahead
from edgeq.targets.cpu.jit import compile, processor
from edgeq.tools.commands.build import build
from tests.cli.conftest import Run

DEFAULTS: dict[str, Any] = {
    "goals": None, "mode": "a8", "caches": ("file",), "out": None, "embedded": False, "target": None, "isa": None,
    "as_json": True,
}  # fmt: skip


@pytest.mark.exhaustive
def test_an_arm_processor_gets_arm_code_from_any_machine(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "pi.kernels"
    build(**{**DEFAULTS, "model": demo, "goals": ("raspberry-pi-5",), "out": path})
    (made,) = kernel_pack.decode(path.read_bytes(), path)
    assert (made.target, made.arch) == ("cpu", "neon-dotprod")
    code = {name: kernel.pieces[0].split(b"\n", 1)[1] for name, kernel in made.kernels.items()}
    # ELF, 64 bits, little endian; e_machine 183 is AArch64.
    assert all(data[:6] == b"\x7fELF\2\1" and data[18] == 183 for data in code.values())
    assert {"threadpool-walk_alone", "threadpool-work", "probe_kernels-read_lines", "elementwise-norm-4"} <= set(code)
    # `sdot v, v, v` of four lanes of bytes (Arm ARM C7.2.298, Q = 1, size = 2), little endian.
    words = [int.from_bytes(data[i : i + 4], "little") for data in code.values() for i in range(0, len(data) - 3, 4)]
    assert any(word & 0xFFE0FC00 == 0x4E809400 or word & 0xFFC0F400 == 0x4F80E000 for word in words)


def test_options_of_different_tasks_are_refused(demo: Path, tmp_path: Path) -> None:
    for given, message in (
        ({"out": tmp_path / "x"}, "name a device with --for"),
        ({"embedded": True}, "name a device with --for"),
        ({"goals": ("raspberry-pi-5",), "target": "cpu"}, "with --for the device says both"),
        ({"goals": ("raspberry-pi-5",), "isa": "avx2"}, "with --for the device says both"),
        ({"goals": ("raspberry-pi-6",)}, "--for raspberry-pi-6: not known; supported: .*neon-dotprod.*raspberry-pi-5"),
    ):
        with pytest.raises(InputError, match=message):
            build(**{**DEFAULTS, "model": demo, **given})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty cache, and a compiler that is quick."""
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(compile, "cache_folder", lambda: tmp_path / "cache" / "kernels")

    def compiled(jobs: Any, device: Any, on_progress: Any = None) -> KernelSet:
        names = [compile.file_name(*job[:1], *job[1]).removesuffix(".o") for job in jobs]
        kernels = {name: StoredKernel(None, (f"{name} for {device.isa}".encode(),)) for name in names}
        return KernelSet("cpu", device.isa, compile.source_digest(), {"numba": "1"}, kernels)

    monkeypatch.setattr(ahead, "compiled", compiled)
    return tmp_path


def test_devices_share_a_pack_and_what_is_there_is_added_to(
    demo: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = elsewhere / "demo.kernels"

    def built(*goals: str, **options: Any) -> dict[str, Any]:
        build(**{**DEFAULTS, "model": demo, "goals": goals, "out": path, **options})
        return dict(json.loads(capsys.readouterr().out))

    first = built("raspberry-pi-5", "raspberry-pi-4")
    archs = [each.arch for each in kernel_pack.decode(path.read_bytes(), path)]
    assert archs == ["neon", "neon-dotprod"] and {row["for"] for row in first["kernels"]} == {
        "raspberry-pi-4",
        "raspberry-pi-5",
    }
    before = {each.arch: set(each.kernels) for each in kernel_pack.decode(path.read_bytes(), path)}
    built("x86-avx2")
    built("raspberry-pi-5", mode="a16")
    after = {each.arch: set(each.kernels) for each in kernel_pack.decode(path.read_bytes(), path)}
    assert set(after) == {"avx2", "neon", "neon-dotprod"} and after["neon"] == before["neon"]
    assert after["neon-dotprod"] > before["neon-dotprod"]
    # One that came from elsewhere would become this machine's own.
    for digest in (elsewhere / "cache" / "trusted").iterdir():
        digest.unlink()
    with pytest.raises(InputError, match="machine code that was made elsewhere.* or give another name with -o"):
        built("x86-avx2")


def test_a_pack_is_trusted_and_told_from_the_command_line(
    edgeq: Run, demo: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = elsewhere / "demo.edgeq"
    model.write_bytes(demo.read_bytes())
    build(**{**DEFAULTS, "model": model, "goals": ("x86-avx2",)})
    capsys.readouterr()
    avx2 = processor.of_isa("avx2")
    monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("any", avx2.arch, avx2.features, 2))
    for digest in (elsewhere / "cache" / "trusted").iterdir():
        digest.unlink()
    (pack,) = json.loads(edgeq("inspect", model, "--json").stdout)["packs"]
    assert pack["archs"].keys() == {"avx2"} and "pass --trust-kernels" in pack["refused"]
    told = edgeq("run", model, "-p", "x", "-n", 1, "--target", "reference", "--trust-kernels")
    assert told.exit_code == 0 and f"trusted from now on, digest {pack['digest']}" in told.stderr
    assert json.loads(edgeq("inspect", model, "--json").stdout)["packs"][0]["refused"] is None


def test_kernels_for_a_processor_inside_the_model_file(demo: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = elsewhere / "with.edgeq"
    build(**{**DEFAULTS, "model": demo, "goals": ("raspberry-pi-5",), "embedded": True, "out": model})
    found = json.loads(capsys.readouterr().out)
    file = ModelFile.open(model)
    assert list(file.metadata.kernels) == ["neon-dotprod"] and list(file.verify()) and len(found["packs"]) == 1
