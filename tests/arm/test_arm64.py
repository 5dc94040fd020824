"""The kernels and a whole model on Arm processors that qemu emulates: those of Raspberry Pi 4 and 5, and one with i8mm."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.format import kernel_pack
from edgeq.format.kernel_pack import KernelSet, beside
from edgeq.runtime import Model
from edgeq.system.devices import DEVICES
from edgeq.targets.cpu import ahead
from edgeq.targets.cpu.jit.parallel import Job
from edgeq.targets.target import Options
from edgeq.tools.commands.build import build
from tests.arm import panels
from tests.arm.tiles import write_objects
from tests.targets.cases import run

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "arm64"
PROMPT = "def read_file(path):"
pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(not (BUILT / "stamp").exists(), reason="run make setup-arm64")]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    path = tmp_path_factory.mktemp("arm") / "tiny-llama.edgeq"
    # Head and layers share their kernels, which halves what the emulator compiles.
    options = ConvertOptions(method="rtn", bits=4, group_size=32, head=4)
    convert(str(ROOT / "models" / "tiny-llama"), path, options, lambda *_: None)
    return path


def on_arm(cpu: str, folder: Path, cache: Path) -> None:
    """Run on_arm.py on an emulated processor, which keeps its kernels in `cache`; it must pass."""
    root = BUILT / "root"
    command = [BUILT / "qemu-aarch64-static", "-L", root, "-cpu", cpu, root / "usr/bin/python3.11"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    script = [ROOT / "tests/arm/on_arm.py", folder]
    result = subprocess.run([*command, *script], cwd=ROOT, env=environment, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("board", ["raspberry-pi-4", "raspberry-pi-5"])
def test_kernels_and_generation_on(board: str, model_file: Path, tmp_path: Path) -> None:
    cpu = {"raspberry-pi-4": "cortex-a72", "raspberry-pi-5": "cortex-a76"}[board]
    isa = DEVICES[board].isa
    write_objects(tmp_path / "tiles", board, isa)
    runs = []
    settings: list[dict[str, Any]] = [{"mode": "a8", "kv": "f16"}, {"mode": "a16", "kv": "f16"}, {"mode": "a8", "kv": "int8"}]
    for setting in settings:
        generation = Model.load(model_file, context=256, threads=1, **setting).generate(PROMPT, max_tokens=24)
        "".join(generation)
        runs.append({**setting, "tokens": generation.tokens})
    assert platform.machine() == "x86_64" and len(runs[0]["tokens"]) == 24
    expect = {"isa": isa, "model": str(model_file), "prompt": PROMPT, "runs": runs}
    (tmp_path / "expect.json").write_text(json.dumps(expect))
    # Machine code is kept: a second run compiles only what has changed.
    on_arm(cpu, tmp_path, BUILT / f"cache-{cpu}")


def write_kernels(folder: Path, made: Iterable[KernelSet]) -> None:
    folder.mkdir(exist_ok=True)
    for each in made:
        for name, kernel in each.kernels.items():
            (folder / f"{name}.o").write_bytes(kernel.pieces[0])


def test_products_of_octets_and_a_model_with_them(model_file: Path, tmp_path: Path) -> None:
    """No board of ours has i8mm, so its kernels are all compiled here: tiles, products, and those of a model."""
    device = DEVICES["snapdragon-x-elite"]
    write_objects(tmp_path / "tiles", "graviton-3", device.isa)
    jobs, results = list[Job](), dict[str, np.ndarray]()
    for case in panels.CASES:
        graph, arrays = panels.graph_of(case)
        options = Options(case.mode, 1, max_rows=panels.ROWS_OF_TOKENS, max_logits=panels.ROWS_OF_TOKENS)
        jobs += ahead.jobs_for(device, graph, arrays, options, (case.mode,))  # type: ignore[arg-type]
        results[case.name] = run("cpu", graph, arrays, panels.ROWS_OF_TOKENS, options)
    np.savez(tmp_path / "panels.npz", **results)  # type: ignore[arg-type]
    write_kernels(tmp_path / "kernels", [ahead.compiled(list(dict.fromkeys(jobs)), device)])
    none: dict[str, Any] = {"out": None, "embedded": False, "target": None, "isa": None, "as_json": True}
    build(model=model_file, goals=[device.name], mode="a8", caches=["file"], **none)
    write_kernels(tmp_path / "kernels", kernel_pack.decode(beside(model_file).read_bytes(), "pack"))
    beside(model_file).unlink()
    generation = Model.load(model_file, context=256, threads=1, mode="a8").generate(PROMPT, max_tokens=24)
    "".join(generation)
    runs = [{"mode": "a8", "kv": "f16", "tokens": generation.tokens}]
    expect = {"isa": device.isa, "model": str(model_file), "prompt": PROMPT, "runs": runs}
    (tmp_path / "expect.json").write_text(json.dumps(expect))
    on_arm("max", tmp_path, tmp_path / "cache")


def test_kernels_compiled_here_run_there(model_file: Path, tmp_path: Path) -> None:
    """Made on the machine of the tests, trusted and run on the emulated one, which compiles nothing."""
    root = BUILT / "root"
    none: dict[str, Any] = {"out": None, "embedded": False, "target": None, "isa": None, "as_json": True}
    build(model=model_file, goals=["raspberry-pi-5"], mode="a8", caches=["file"], **none)
    made = {f"{name}.o" for each in kernel_pack.decode(beside(model_file).read_bytes(), "pack") for name in each.kernels}
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def there(*arguments: str | Path) -> str:
        emulated = [BUILT / "qemu-aarch64-static", "-L", root, "-cpu", "cortex-a76", root / "usr/bin/python3.11", "-m", "edgeq"]
        result = subprocess.run([*emulated, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    written = json.loads(there("run", model_file, "-p", PROMPT, "-n", "8", "--mode", "a8", "--json", "--trust-kernels"))
    assert made and {path.name for path in (tmp_path / "cache").rglob("*.o")} == made
    generation = Model.load(model_file, context=256, threads=1, mode="a8").generate(PROMPT, max_tokens=8)
    assert written["text"] == generation.text()
