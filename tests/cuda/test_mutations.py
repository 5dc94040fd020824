"""A barrier or a wait that is missing is seen on the emulator, in at least one order of threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from edgeq.codec import Codec
from edgeq.errors import DeviceError
from edgeq.targets.cuda import build
from edgeq.targets.cuda.pack import Generated, Variant
from tests.cuda.emulated import BACKWARD, FORWARD, SHUFFLED
from tests.cuda.launching import launched, product_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

ORDERS = (FORWARD, BACKWARD, SHUFFLED)
BARRIER, WARP = "tvm_builtin_cuda_cta_sync();", "tvm_builtin_cuda_warp_sync();"
WAIT = "tvm_builtin_ptx_cp_async_wait_group_async_wait_group_{}();"
Run = Callable[[Generated, int], np.ndarray]


def product(kernel: Generated, order: int) -> np.ndarray:
    """Twenty groups, more than a round of `few`, and two tiles of tokens of `many`."""
    case = product_of(Codec("int", 4, 128), False, 40, 2560)
    x = np.random.default_rng(1).standard_normal((70, 2560)).astype(np.float32)
    (form,) = build.kernels([case.variant("form")])
    return case.product(kernel, case.formed(form, x, 0), 70, np.full((70, 40), np.nan, np.float32), None, order)


def norm(kernel: Generated, order: int) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((3, 300)).astype(np.float32)
    arrays = {"x": x, "gain": np.ones(300, np.float32), "out": np.zeros_like(x)}
    return launched(kernel, arrays, {"tokens": 3, "width": 300, "eps": 1e-5}, order)["out"]


def attend(kernel: Generated, order: int) -> np.ndarray:
    """Two query heads and one of keys and values, 100 slots in two pages."""
    rng = np.random.default_rng(1)
    arrays = {
        "q": rng.standard_normal((2, 64)).astype(np.float32),
        "pool": rng.standard_normal(2 * 2 * 64 * 32).astype(np.float16),
        "pages": np.array([0, 2 * 64 * 32 // 8], np.int64),
        "tables": np.zeros(2, np.int32),
        "slots": np.array([70, 99], np.int32),
        "out": np.zeros((2, 64), np.float32),
    }
    scalars = {"tokens": 2, "width": 64, "heads": 2, "kv_heads": 1, "layer": 0, "window": 0, "scale": 0.2}
    return launched(kernel, arrays, scalars, order)["out"]


FEW, MANY = Variant("few", (4, False, False, 128)), Variant("many", (4, False, False, 128))
MUTATIONS: list[tuple[str, Variant, Run, str, int]] = [
    ("few: products are added before all are there", FEW, product, BARRIER, 0),
    ("few: the next round overwrites what is not yet added", FEW, product, BARRIER, 1),
    ("many: tokens are read before others have them", MANY, product, BARRIER, 0),
    ("many: the next tokens overwrite what is still read", MANY, product, BARRIER, 1),
    ("many: tokens are read before they have come", MANY, product, WAIT.format(1), 0),
    ("many: the last tokens are read before they have come", MANY, product, WAIT.format(0), 0),
    ("norm: sums of other warps are read too early", Variant("rms_norm"), norm, BARRIER, 0),
    ("attend: the query is read before it is whole", Variant("attend", (32,)), attend, WARP, 0),
    ("attend: weights of other lanes are read too early", Variant("attend", (32,)), attend, WARP, 1),
]


SHARE = "few: products are added before all are there", "attend: weights of other lanes are read too early"
CASES = [pytest.param(*rest, id=name, marks=() if name in SHARE else pytest.mark.exhaustive) for name, *rest in MUTATIONS]


def without(text: str, line: str, place: int) -> str:
    """The text of a kernel without the `place`-th call of what `line` calls."""
    parts = text.split(line)
    assert len(parts) > place + 1, f"only {len(parts) - 1} of {line}"
    return line.join(parts[: place + 1]) + line.join(["", *parts[place + 1 :]])[len(line) :]


@pytest.mark.parametrize(("variant", "run", "line", "place"), CASES)
def test_a_removed_line_is_noticed(variant: Variant, run: Run, line: str, place: int) -> None:
    (intact,) = build.kernels([variant])
    mutated = replace(intact, text=without(intact.text, line, place))
    assert len(mutated.text) == len(intact.text) - len(line)
    right = run(intact, FORWARD)
    assert np.isfinite(right).all()
    assert all(np.array_equal(run(intact, order), right) for order in ORDERS)
    assert any(noticed(mutated, run, order, right) for order in ORDERS)


def noticed(mutated: Generated, run: Run, order: int, right: np.ndarray) -> bool:
    try:
        return not np.array_equal(run(mutated, order), right)
    except DeviceError:
        return True
