"""Where kernels come from, and that a refusal names a command that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.writer import Writer
from edgeq.system.devices import DEVICES
from edgeq.targets.cuda.supply import build, nvrtc
from edgeq.targets.cuda.supply.nvrtc import Compiled
from edgeq.targets.cuda.supply.pack import Generated, Variant
from edgeq.targets.cuda.supply.supply import Supply, preferred
from edgeq.targets.target import Goal
from edgeq.tools.commands.build import goal_of
from tests.edgeq.format.sample_file import write_body

pytestmark = pytest.mark.cuda

SELECT = Variant("select")
CAPABILITIES = (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    writer = Writer(tmp_path / "my model.edgeq")
    writer.finish(write_body(writer))
    return ModelFile.open(tmp_path / "my model.edgeq")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without TVM and NVRTC, and with an empty cache."""
    monkeypatch.setattr(build, "refusal", lambda: "apache-tvm is not installed")
    monkeypatch.setattr(nvrtc, "refusal", lambda: "NVRTC is not installed")
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")


def wanted_for(message: str) -> str:
    """What the command of a refusal builds for."""
    (command,) = re.findall(r"edgeq build .*", message)
    words = shlex.split(command)
    return words[words.index("--for") + 1]


def goal(name: str) -> Goal:
    """What `edgeq build --for` makes of a name of a GPU."""
    target, found = goal_of(name)
    assert target == "cuda"
    return found


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("sm", CAPABILITIES)
def test_the_command_of_every_refusal_builds_what_the_gpu_runs(model: ModelFile, sm: int) -> None:
    """A GPU that NVRTC does not know yet runs PTX; `edgeq build` for its own name would be refused, or make something else."""
    kernels = Supply(model, sm, 13000)
    refused = kernels.refusal()
    assert refused is not None
    with pytest.raises(UnsupportedError) as missing:
        kernels([SELECT], lambda *_: None)
    for message in (refused, str(missing.value)):
        assert preferred([goal(wanted_for(message)).arch], sm, 13000), message


@pytest.mark.parametrize("sm", CAPABILITIES)
def test_a_gpu_may_be_named_by_its_capability(sm: int) -> None:
    assert preferred([goal(f"SM_{sm}").arch], sm)


def test_every_gpu_that_is_known_by_name_can_be_built_for() -> None:
    gpus = [device for device in DEVICES.values() if device.isa.startswith("sm_")]
    assert {"rtx-3060", "rtx-5090", "a100-80gb", "h100", "h200", "jetson-agx-thor"} <= {device.name for device in gpus}
    for device in gpus:
        assert preferred([goal(device.name).arch], int(device.isa[3:])) and goal(device.name).device is device


@pytest.mark.usefixtures("bare")
def test_kernels_of_the_cache_are_enough(model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pack and no compiler: what this machine, or the one that its cache was carried from, compiled before."""
    generated = Generated(SELECT, "select", "text", (), (1, 1, 1), (1, 1, 1))
    monkeypatch.setattr(nvrtc, "refusal", lambda: None)
    monkeypatch.setattr(nvrtc, "reproduced", lambda each, arch: Compiled(arch, b"\x7fELF code"))
    build.compiled(SELECT, ["sm_87"], generated)
    monkeypatch.setattr(nvrtc, "refusal", lambda: "NVRTC is not installed")
    assert Supply(model, 87).refusal() is None and Supply(model, 89).refusal() is not None
    (found,) = Supply(model, 87)([SELECT], lambda *_: None)
    assert found.image == b"\x7fELF code"
    # Of another compiler it is not what this version would make.
    monkeypatch.setattr(build, "image_digest", lambda: "0" * 32)
    assert Supply(model, 87).refusal() is not None
