"""What runs on the Arm processor itself, real or emulated: `python on_arm.py FOLDER`, where test_arm64.py put its files.

FOLDER/tiles/*.o    inner tiles of the instruction set
FOLDER/kernels/*.o  kernels that were compiled elsewhere: all that the tests run but those that expect.json names
FOLDER/panels.npz   results of panels.py by name, from another processor
FOLDER/expect.json  the instruction set to be chosen; a model file, a prompt and another processor's tokens, by mode and cache;
                    the files of the kernels that are compiled here;
                    how many tiles there are
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
    cases = [case for case in tiles.CASES if (FOLDER / "tiles" / f"{case.symbol}.o").exists()]
    assert len(cases) == expected()["tiles"]
    for case in cases:
        engine.add_object_file(llvm.ObjectFileRef.from_path(str(FOLDER / "tiles" / f"{case.symbol}.o")))
    engine.finalize_object()
    for case in cases:
        function = TILE(engine.get_function_address(case.symbol))
        for extreme in (False, True):
            y, oracle = tiles.product(function, expected()["isa"], case, extreme)
            # Integer sums are exact; what remains is the rounding of a few f32 operations.
            assert np.abs(y - oracle).max() < 2e-6 * np.abs(oracle).max(), (case, extreme)


@pytest.mark.skipif(not expected()["products"], reason="products of this instruction set are those of panels.npz")
def test_products_equal_the_reference() -> None:
    import numpy as np

    from edgeq.targets.target import Options
    from tests.arm import products
    from tests.targets.cases import matrix, run

    for case in products.CASES:
        graph, arrays, w, x = case.graph()
        oracle = x.astype(np.float64) @ matrix(arrays, w).T
        size = np.abs(x) @ np.abs(matrix(arrays, w)).T
        many = run("cpu", graph, arrays, products.ROWS, Options(case.mode, 2))
        assert np.max(np.abs(many - oracle) / size) < {"a8": 1e-6, "a16": 2e-5}[case.mode], case
        assert np.array_equal(run("cpu", graph, arrays, 1, Options(case.mode, 1))[0], many[0]), "a row alone has the same bits"


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


def test_only_what_was_left_to_it_was_compiled_here() -> None:
    from edgeq.targets.cpu.jit.compile import cache_folder

    before = {path.name for path in FOLDER.glob("kernels/*.o")}
    assert sorted({path.name for path in cache_folder().glob("*.o")} - before) == expected()["compiled"]


def test_no_kernel_was_linked_by_llvm() -> None:
    from edgeq.targets.cpu.jit import compile

    assert not compile._kept


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import edgeq

    # The folders as installed: edgeq.targets is the checkout's targets.
    edgeq.__path__.append(str(ROOT))
    keep_kernels()
    sys.exit(pytest.main([__file__, "-x", "-v", "-p", "no:cacheprovider", "--durations=8", "--rootdir", str(ROOT)]))
