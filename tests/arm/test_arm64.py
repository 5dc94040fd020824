"""The kernels and a whole model on Arm processors that qemu emulates: those of Raspberry Pi 4 and 5, and one with i8mm."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.format import kernel_pack
from edgeq.format.kernel_pack import beside
from edgeq.format.records import Mode
from edgeq.runtime import Model
from edgeq.system.devices import DEVICES
from edgeq.targets.cpu.isa import isa_index
from edgeq.targets.cpu.jit.compile import file_name
from edgeq.targets.cpu.kernels.products.matmul import integer_matvec
from edgeq.targets.target import Options
from edgeq.tools.commands.build import build
from tests.arm import panels
from tests.arm.ahead_of_arm import Kernels, compiled, kernels_of, of_model, of_panels, of_products
from tests.arm.tiles import CASES, emitted, isa_of, write_objects
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


@pytest.fixture(scope="module")
def written(model_file: Path) -> Callable[[Mode, Any], dict[str, Any]]:
    """What the model writes on this machine, in a mode and with a cache: their names and tokens."""

    @cache
    def get(mode: Mode, kv: Any) -> dict[str, Any]:
        generation = Model.load(model_file, context=256, threads=1, mode=mode, kv=kv).generate(PROMPT, max_tokens=24)
        "".join(generation)
        assert platform.machine() == "x86_64" and len(generation.tokens) == 24
        return {"mode": mode, "kv": kv, "tokens": generation.tokens}

    return get


@pytest.fixture(scope="module")
def pack(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of the model in a8 for a Raspberry Pi 5, as `edgeq build` writes them."""
    path = tmp_path_factory.mktemp("pack") / beside(model_file).name
    none: dict[str, Any] = {"embedded": False, "target": None, "isa": None, "as_json": True}
    build(model=model_file, goals=["raspberry-pi-5"], mode="a8", caches=["file"], out=path, **none)
    return path


def on_arm(cpu: str, folder: Path, kernels: Kernels, **expected: Any) -> None:
    """Run on_arm.py on an emulated processor; it must pass."""
    (folder / "kernels").mkdir()
    for name, code in kernels.items():
        (folder / "kernels" / f"{name}.o").write_bytes(code)
    (folder / "expect.json").write_text(json.dumps({"prompt": PROMPT, **expected}))
    root = BUILT / "root"
    command = [BUILT / "qemu-aarch64-static", "-L", root, "-cpu", cpu, root / "usr/bin/python3.11"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    script = [ROOT / "tests/arm/on_arm.py", folder]
    result = subprocess.run([*command, *script], cwd=ROOT, env=environment, capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("board", "cpu"), [("raspberry-pi-4", "cortex-a72"), ("raspberry-pi-5", "cortex-a76")])
def test_kernels_and_generation_on(
    board: str, cpu: str, model_file: Path, pack: Path, written: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """One kernel is left to the emulated Raspberry Pi 4, so that Numba and LLVM are tried there; all others come from here."""
    device = DEVICES[board]
    write_objects(tmp_path / "tiles", board, device.isa)
    ready = kernels_of(kernel_pack.decode(pack.read_bytes(), "pack")) if board == "raspberry-pi-5" else {}
    jobs = [*of_model(model_file, device, [(("a8", "a16"), "f16"), (("a8",), "int8")]), *of_products(device)]
    of_three_bits = isa_index(isa_of(device.isa)), 3
    there = [file_name(job[0], *job[1]) for job in jobs if job[0] is integer_matvec and job[1][:2] == of_three_bits]
    there = there[: int(board == "raspberry-pi-4")]
    kernels = {**ready, **compiled(jobs, device, without=[*ready, *(Path(name).stem for name in there)])}
    runs = [written("a8", "f16"), written("a16", "f16"), written("a8", "int8")]
    expected = {"isa": device.isa, "tiles": len(CASES), "products": True, "model": str(model_file), "runs": runs}
    on_arm(cpu, tmp_path, kernels, **expected, compiled=there)


def test_products_of_octets_and_a_model_with_them(
    model_file: Path, written: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """No board of ours has i8mm: its tiles of several tokens (those of one are made of dot products), products, and a model."""
    device = DEVICES["snapdragon-x-elite"]
    several = [case for case in CASES if case.tokens > 1]
    # A third of them, in the modes by turns: nothing in them asks for i8mm.
    alone = [case for case in CASES if case.tokens == 1][::3]
    assert all(emitted(device.isa, case) == emitted("neon-dotprod", case) for case in alone)
    write_objects(tmp_path / "tiles", "graviton-3", device.isa, several)
    results = dict[str, np.ndarray]()
    for case in panels.CASES:
        graph, arrays = panels.graph_of(case)
        options = Options(case.mode, 1, max_rows=panels.ROWS_OF_TOKENS, max_logits=panels.ROWS_OF_TOKENS)
        results[case.name] = run("cpu", graph, arrays, panels.ROWS_OF_TOKENS, options)
    np.savez(tmp_path / "panels.npz", **results)  # type: ignore[arg-type]
    kernels = compiled([*of_panels(device), *of_model(model_file, device, [(("a8",), "f16")])], device)
    runs = [written("a8", "f16")]
    expected = {"isa": device.isa, "tiles": len(several), "products": False, "model": str(model_file), "runs": runs}
    on_arm("max", tmp_path, kernels, **expected, compiled=[])


def test_kernels_compiled_here_run_there(model_file: Path, pack: Path, tmp_path: Path) -> None:
    """Made on the machine of the tests, trusted and run on the emulated one, which compiles nothing."""
    root = BUILT / "root"
    model = tmp_path / model_file.name
    shutil.copy(model_file, model)
    shutil.copy(pack, beside(model))
    made = {f"{name}.o" for name in kernels_of(kernel_pack.decode(pack.read_bytes(), "pack"))}
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def there(*arguments: str | Path) -> str:
        emulated = [BUILT / "qemu-aarch64-static", "-L", root, "-cpu", "cortex-a76", root / "usr/bin/python3.11", "-m", "edgeq"]
        result = subprocess.run([*emulated, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    written = json.loads(there("run", model, "-p", PROMPT, "-n", "8", "--mode", "a8", "--json", "--trust-kernels"))
    assert made and {path.name for path in (tmp_path / "cache").rglob("*.o")} == made
    generation = Model.load(model_file, context=256, threads=1, mode="a8").generate(PROMPT, max_tokens=8)
    assert written["text"] == generation.text()
