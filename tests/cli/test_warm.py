"""`edgeq warm`: kernels for this machine, for another, and from another."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import click
import pytest

from edgeq.errors import InputError
from edgeq.system import machine
from edgeq.system.devices import DEVICES
from edgeq.system.trust import digest_of
from edgeq.targets.cpu.jit import compile
from edgeq.tools.commands.warm import warm

NONE = {"model": None, "device": None, "out": None, "source": None, "trust": None}
TARGET = {
    "mode": "a8", "kv": "file", "isa": None, "target": None, "requantization": None, "threads": 0, "threads_prefill": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def for_pi(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "pi.zip"
    warm(**{**NONE, **TARGET, "model": demo, "device": "raspberry-pi-5", "out": path})  # type: ignore[arg-type]
    return path


@pytest.mark.exhaustive
def test_an_arm_processor_gets_arm_code_from_any_machine(for_pi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(for_pi) as files:
        about = json.loads(files.read("kernels.json"))
        code = {name: files.read(name).split(b"\n", 1)[1] for name in files.namelist()[1:]}
    assert about["arch"] == "aarch64" and "dotprod" in about["features"] and about["device"] == "raspberry-pi-5"
    # ELF, 64 bits, little endian; e_machine 183 is AArch64.
    assert all(data[:6] == b"\x7fELF\2\1" and data[18] == 183 for data in code.values())
    assert {"threadpool-walk_alone.o", "threadpool-work.o", "probes-read_lines.o", "elementwise-norm-4.o"} <= set(code)
    # `sdot v, v, v` of four lanes of bytes (Arm ARM C7.2.298, Q = 1, size = 2), little endian.
    words = [int.from_bytes(data[i : i + 4], "little") for data in code.values() for i in range(0, len(data) - 3, 4)]
    assert any(word & 0xFFE0FC00 == 0x4E809400 or word & 0xFFC0F400 == 0x4F80E000 for word in words)


def test_options_of_different_tasks_are_refused(demo: Path, tmp_path: Path) -> None:
    wrong = (
        ({}, "give a model file"),
        ({"model": demo, "source": tmp_path}, "give a model file"),
        ({"model": demo, "device": "raspberry-pi-5"}, "--for and -o go together"),
        ({"model": demo, "out": tmp_path / "x"}, "--for and -o go together"),
        ({"model": demo, "trust": "0"}, "--trust goes with --from"),
        ({"model": demo, "device": "raspberry-pi-5", "out": tmp_path / "x", "target": "reference"}, "compiles nothing"),
    )
    for given, message in wrong:
        with pytest.raises(InputError, match=message):
            warm(**{**NONE, **TARGET, **given})  # type: ignore[arg-type]


def test_the_user_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from edgeq.targets.cpu.jit import archive
    from edgeq.targets.cpu.jit.processor import of_device

    device = DEVICES["x86-avx2"]
    cpu = machine.Cpu("any", of_device(device).arch, of_device(device).features, 2)
    monkeypatch.setattr(machine, "cpu", lambda: cpu)
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(compile, "cache_folder", lambda: tmp_path / "cache" / "kernels")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "norms-scale.o").write_bytes(b"code")
    path = tmp_path / "kernels.zip"
    archive.write(path, tmp_path / "made", device)
    digest = digest_of(path.read_bytes())

    def run(trust: str | None = None) -> None:
        warm(**{**NONE, "source": path, "trust": trust})  # type: ignore[arg-type]

    with pytest.raises(InputError, match=f"if its maker told you this digest, pass --trust {digest}"):
        run()
    with pytest.raises(InputError, match=f"its digest is {digest}, not 1234; nothing was installed"):
        run("1234")
    monkeypatch.setattr("edgeq.tools.commands.warm.sys.stdin", type("Terminal", (), {"isatty": staticmethod(lambda: True)}))
    answers = [False, True]
    monkeypatch.setattr(click, "confirm", lambda *_, **__: answers.pop(0))
    with pytest.raises(InputError, match="nothing was installed"):
        run()
    assert not (tmp_path / "cache").exists()
    capsys.readouterr()
    run()
    shown = capsys.readouterr().err
    assert f"1 kernels for x86-avx2, digest {digest}" in shown and "1 of 1 kernels added" in shown
    assert (tmp_path / "cache" / "kernels" / "norms-scale.o").read_bytes() == b"code"
    # No third answer: it is not asked again.
    run()
    assert "0 of 1 kernels added" in capsys.readouterr().err
