"""What runs on the Arm processor itself, real or emulated: `python on_arm.py FOLDER`, where test_arm64.py put its files.

FOLDER/tiles/*.o    every inner tile of the instruction set
FOLDER/kernels/*.o  kernels that were compiled elsewhere
FOLDER/panels.npz   results of panels.py by name, from another processor
FOLDER/expect.json  the instruction set to be chosen; a model file, a prompt and another processor's tokens, by mode and cache
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.argv[-1])
TILE = ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * 4)


def keep_kernels() -> None:
    """Put the kernels that were compiled elsewhere where kernels are looked for."""
    from edgeq.targets.cpu.jit.compile import cache_folder

    cache_folder().mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("kernels/*.o"):
        shutil.copy(path, cache_folder())


def expected() -> Any:
    return json.loads((FOLDER / "expect.json").read_text())


def test_the_instruction_set_of_the_processor_is_chosen() -> None:
    from edgeq.targets.cpu.choose_isa import choose

    isa, _ = choose()
    assert isa.name == expected()["isa"]


def test_every_tile_equals_integer_arithmetic() -> None:
    import llvmlite.binding as llvm
    import numpy as np

    from tests.arm import tiles

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    for case in tiles.CASES:
        engine.add_object_file(llvm.ObjectFileRef.from_path(str(FOLDER / "tiles" / f"{case.symbol}.o")))
    engine.finalize_object()
    for case in tiles.CASES:
        function = TILE(engine.get_function_address(case.symbol))
        for extreme in (False, True):
            y, oracle = tiles.product(function, expected()["isa"], case, extreme)
            # Integer sums are exact; what remains is the rounding of a few f32 operations.
            assert np.abs(y - oracle).max() < 2e-6 * np.abs(oracle).max(), (case, extreme)


@pytest.mark.parametrize("bits, group, symmetric", [(4, 32, True), (3, 0, False)])
def test_products_equal_the_reference(bits: int, group: int, symmetric: bool) -> None:
    import numpy as np

    from edgeq.format.codec import Codec
    from edgeq.format.quantization import activation_limit
    from edgeq.targets.target import Options
    from tests.targets.cases import Arrays, matrix, product, run, weight

    rng, arrays = np.random.default_rng(bits), Arrays()
    w = weight(arrays, rng, Codec("int", bits, group, symmetric), 33, 192)
    for mode, bound, limit in (("a8", 1e-6, activation_limit(w.codec, "a8")), ("a16", 2e-5, 127)):
        x = rng.integers(-limit, limit + 1, (7, 192)).astype(np.float32) / 128
        x[:, ::32] = limit / 128
        graph = product(arrays, x, w)
        oracle = x.astype(np.float64) @ matrix(arrays, w).T
        size = np.abs(x) @ np.abs(matrix(arrays, w)).T
        many = run("cpu", graph, arrays, 7, Options(mode, 2))
        assert np.max(np.abs(many - oracle) / size) < bound, mode
        assert np.array_equal(run("cpu", graph, arrays, 1, Options(mode, 1))[0], many[0]), "a row alone must give the same bits"


@pytest.mark.skipif(not (FOLDER / "panels.npz").exists(), reason="an instruction set without panels")
def test_panels_give_the_bits_of_another_processor() -> None:
    import numpy as np

    from edgeq.targets.target import Options
    from tests.arm import panels
    from tests.targets.cases import run

    results = np.load(FOLDER / "panels.npz")
    for case in panels.CASES:
        graph, arrays = panels.graph_of(case)
        for count in panels.COUNTS:
            y = run("cpu", graph, arrays, count, Options(case.mode, 1))
            assert np.array_equal(y, results[case.name][:count]), (case.name, count)


def test_a_model_writes_what_it_writes_elsewhere() -> None:
    from edgeq.runtime import Model

    for run in expected()["runs"]:
        model = Model.load(expected()["model"], threads=2, threads_prefill=2, context=256, mode=run["mode"], kv=run["kv"])
        generation = model.generate(expected()["prompt"], max_tokens=len(run["tokens"]))
        "".join(generation)
        assert generation.tokens == run["tokens"], run["mode"]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import edgeq

    # The folders as installed: edgeq.targets is the checkout's targets.
    edgeq.__path__.append(str(ROOT))
    keep_kernels()
    sys.exit(pytest.main([__file__, "-x", "-v", "-p", "no:cacheprovider", "--durations=8", "--rootdir", str(ROOT)]))
