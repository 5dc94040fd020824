"""A barrier, a wait, a fence or an arrival that is missing is seen on the emulator, in at least one order of threads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from edgeq.errors import DeviceError
from edgeq.format.codec import Codec
from edgeq.targets.cuda.lowering.largest import DRAW_NUMBERS, MAX_COUNT
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.pack import Generated, Variant
from tests.cuda.emulated import BACKWARD, CHECKED, FORWARD, SHUFFLED
from tests.cuda.launching import launched, product_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

ORDERS = (FORWARD, BACKWARD, SHUFFLED)
BARRIER, WARP, FENCE = (rf"tvm_builtin_cuda_{name}\(\);" for name in ("cta_sync", "warp_sync", "thread_fence"))
WAIT = r"tvm_builtin_ptx_cp_async_wait_group_async_wait_group_{}\(\);"
ARRIVAL = r"before_ptr\[0\] = tvm_builtin_cuda_atomic_add\(.*\);"
Run = Callable[[Generated, int], np.ndarray]


def product(kernel: Generated, order: int) -> np.ndarray:
    """Twenty groups, more than a round of `matvec`, and two tiles of tokens of `matmul`."""
    case = product_of(Codec("int", 4, 128), False, 40, 2560)
    x = np.random.default_rng(1).standard_normal((70, 2560)).astype(np.float32)
    (quantize_input,) = build.kernels([case.variant("quantize_input")])
    return case.product(kernel, case.quantized(quantize_input, x, 0), 70, np.full((70, 40), np.nan, np.float32), None, order)


def norm(kernel: Generated, order: int) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((3, 300)).astype(np.float32)
    arrays = {"x": x, "gain": np.ones(300, np.float32), "out": np.zeros_like(x)}
    return launched(kernel, arrays, {"tokens": 3, "width": 300, "add": 0, "eps": 1e-5}, order)["out"]


def attend(kernel: Generated, order: int) -> np.ndarray:
    """Four query heads and one of keys and values; a row sees 50 slots in one part, the next one 1,600 in 26, side by side."""
    rng, parts = np.random.default_rng(1), 26
    arrays = {
        "q": rng.standard_normal((2, 256)).astype(np.float32),
        "pool": rng.standard_normal(2 * 2 * 64 * 64).astype(np.float16),
        "pages": np.arange(parts, dtype=np.int64) % 2 * (2 * 64 * 64 // 8),
        "tables": np.zeros(2, np.int32),
        "firsts": np.zeros(2, np.int32),
        "lasts": np.array([50, 1600], np.int32),
        "out": np.zeros((2, 256), np.float32),
        "numbers": np.zeros(1, np.float32),
        "sums": np.zeros((2, 4, parts, 96), np.float32),
        "arrived": np.zeros(2, np.int32),
    }
    scalars = {"tokens": 2, "width": 256, "heads": 4, "kv_heads": 1, "layer": 0, "window": 0, "high": 0, "scale": 0.1}
    scalars |= {"sinks": 0, "has_sinks": 0, "level": 0, "taken": 1}
    return launched(kernel, arrays, {**scalars, "parts": parts}, order)["out"]


def attend_together(kernel: Generated, order: int) -> np.ndarray:
    """18 token rows of two sessions in two blocks of threads: 9 rows each, 150 slots in three pages, each a part."""
    rng = np.random.default_rng(1)
    arrays = {
        "q": rng.standard_normal((18, 64)).astype(np.float32),
        "pool": rng.standard_normal(6 * 2 * 64 * 32).astype(np.float16),
        "pages": np.arange(6, dtype=np.int64) * (2 * 64 * 32 // 8),
        "tables": np.repeat(np.array([0, 3], np.int32), 9),
        "firsts": np.zeros(18, np.int32),
        "lasts": np.tile(np.arange(142, 151, dtype=np.int32), 2),
        "out": np.zeros((18, 64), np.float32),
    }
    scalars = {"tokens": 18, "width": 64, "heads": 2, "kv_heads": 1, "layer": 0, "window": 0, "high": 0, "scale": 0.2}
    scalars |= {"sinks": 0, "has_sinks": 0, "level": 1, "taken": 1}
    return launched(kernel, arrays, {**scalars, "parts": 0}, order)["out"]


def largest(kernel: Generated, order: int) -> np.ndarray:
    """The five largest of 300 numbers."""
    arrays = {
        "x": np.random.default_rng(1).standard_normal((2, 300)).astype(np.float32),
        "given": np.zeros(1, np.int32), "sound": np.zeros(1, np.int32), "values": np.zeros((2, 5), np.float32),
        "ids": np.zeros((2, 5), np.int32), "finite": np.zeros(2, np.int32),
    }  # fmt: skip
    return launched(kernel, arrays, {"tokens": 2, "width": 300, "sounds": 0, "count": 5}, order)["ids"]


def draw(kernel: Generated, order: int) -> np.ndarray:
    """Tokens of 64 rows, from 40 each; half of them are cut."""
    rng = np.random.default_rng(1)
    draws = np.stack([np.ones(64), np.full(64, 40), np.where(np.arange(64) % 2, 0.7, 1), np.zeros(64), rng.random(64)], axis=1)
    arrays = {
        "values": -np.sort(rng.random((64, 40)).astype(np.float32), axis=1), "draws": draws,
        "ids": np.tile(np.arange(40, dtype=np.int32), (64, 1)), "drawn": np.zeros(64, np.int32),
    }  # fmt: skip
    return launched(kernel, arrays, {"tokens": 64, "count": 40}, order)["drawn"]


def short_conv(kernel: Generated, order: int) -> np.ndarray:
    """The ring of a state after 40 rows of a session, more than it has places, and the rows of another one in between."""
    rng, rows, width, padded = np.random.default_rng(1), 47, 20, 32
    sessions = np.zeros(rows, np.int32)
    sessions[5::6] = 1
    slots = np.zeros(rows, np.int32)
    for session, begin in ((0, 9), (1, 100)):
        slots[sessions == session] = begin + np.arange((sessions == session).sum())
    arrays = {
        "x": rng.standard_normal((rows, width)).astype(np.float32),
        "weight": rng.standard_normal((width, 4)).astype(np.float32), "bias": np.zeros(1, np.float32),
        "out": np.zeros((rows, width), np.float32), "order": np.lexsort((slots, sessions)).astype(np.int32),
        "begins": np.array([0, (sessions == 0).sum(), rows], np.int32), "slots": slots,
        "states": np.array([0, 19 * padded], np.int64), "snapshots": np.zeros(rows, np.int64),
        "numbers": rng.standard_normal(2 * 19 * padded).astype(np.float32),
    }  # fmt: skip
    scalars: dict[str, int | float] = {
        "sessions": 2, "state": 0, "snapshot": 0, "stride": width, "width": width, "padded": padded, "taps": 4, "has_bias": 0,
    }  # fmt: skip
    found = launched(kernel, arrays, scalars, order)
    return np.concatenate([found["out"].ravel(), found["numbers"]])


def row_before(kernel: Generated, order: int) -> np.ndarray:
    """The ring of a state after 40 rows of a session, more than it has places."""
    rng, rows, width, padded = np.random.default_rng(1), 40, 20, 32
    arrays = {
        "x": rng.standard_normal((rows, width)).astype(np.float32), "out": np.zeros((rows, width), np.float32),
        "order": np.arange(rows, dtype=np.int32), "begins": np.array([0, rows], np.int32),
        "slots": 9 + np.arange(rows, dtype=np.int32), "states": np.zeros(1, np.int64), "snapshots": np.zeros(rows, np.int64),
        "numbers": rng.standard_normal(17 * padded).astype(np.float32),
    }  # fmt: skip
    scalars: dict[str, int | float] = {
        "sessions": 1, "state": 0, "snapshot": 0, "stride": width, "width": width, "padded": padded,
    }  # fmt: skip
    found = launched(kernel, arrays, scalars, order)
    return np.concatenate([found["out"].ravel(), found["numbers"]])


def state_scan(kernel: Generated, order: int) -> np.ndarray:
    """12 rows of one head from slot 9 on, which end a log and begin one, and what they leave in the state."""
    rng, rows, dim, columns = np.random.default_rng(1), 12, 24, 16
    log_row = 32 + columns + 16
    room = 2 * dim * columns + 32 * log_row
    arrays = {
        "x": rng.standard_normal((rows, 2 * dim + columns)).astype(np.float32),
        "rates": rng.standard_normal((rows, 2)).astype(np.float32), "decay": np.full(1, -0.1, np.float32),
        "dt_bias": np.zeros(1, np.float32), "skip": np.zeros(1, np.float32),
        "out": np.zeros((rows, columns), np.float32), "order": np.arange(rows, dtype=np.int32),
        "begins": np.array([0, rows], np.int32), "slots": np.arange(9, 9 + rows, dtype=np.int32),
        "states": np.zeros(1, np.int64), "snapshots": np.zeros(rows, np.int64),
        "numbers": rng.standard_normal(room).astype(np.float32),
    }  # fmt: skip
    scalars: dict[str, int | float] = {
        "sessions": 1, "state": 0, "snapshot": 0, "stride": 2 * dim + columns, "rates_stride": 2, "heads": 1, "dim": dim,
        "value_dim": columns, "value_row": columns, "of_keys": 1, "shared": 1, "q_first": 0, "k_first": dim,
        "v_first": 2 * dim, "log": 2 * dim * columns, "log_row": log_row, "log_values": 32, "log_g": 32 + columns,
        "query_scale": 0.2, "beta_scale": 1.0, "least": 0.0, "most": 0.0,
    }  # fmt: skip
    found = launched(kernel, arrays, scalars, order)
    return np.concatenate([found["out"].ravel(), found["numbers"]])


def layer_norm(kernel: Generated, order: int) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((3, 300)).astype(np.float32)
    arrays = {"x": x, "gain": np.ones(300, np.float32), "bias": np.zeros(300, np.float32), "out": np.zeros_like(x)}
    return launched(kernel, arrays, {"tokens": 3, "width": 300, "eps": 1e-5}, order)["out"]


def transform(kernel: Generated, order: int) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32)
    scalars: dict[str, int | float] = {
        "tokens": 2, "columns": 512, "width": 512, "power": 256, "stride": 1, "vectors": 2, "order": 1, "piece": 256,
        "factor": 1.0,
    }  # fmt: skip
    return launched(kernel, {"x": x, "base": np.ones(1, np.float32), "out": np.zeros_like(x)}, scalars, order)["out"]


def token(kernel: Generated, order: int) -> np.ndarray:
    """The scales of three tokens."""
    arrays = {
        "x": np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32),
        "data": np.zeros(512 * 64 // 4, np.uint32),
        "xs": np.zeros(4 * 64, np.float32),
        "xn": np.zeros(4 * 64, np.int32),
    }
    scalars = {"tokens": 3, "columns": 512, "width": 512, "padded": 64, "groups": 4, "symmetric": 0, "levels": 15.0}
    return launched(kernel, arrays, scalars, order)["xs"]


def float_product(kernel: Generated, order: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    arrays = {
        "x": rng.standard_normal((5, 64)).astype(np.float32),
        "q": rng.standard_normal((2, 64, 16)).astype(np.float32),
        "bias": np.zeros(1, np.float32),
        "y": np.zeros((5, 32), np.float32),
    }
    scalars = {"tokens": 5, "columns": 64, "stride": 64, "rows": 32, "width": 32, "has_bias": 0, "add": 0}
    return launched(kernel, arrays, scalars, order)["y"]


def low_rank(kernel: Generated, order: int) -> np.ndarray:
    """Four rounds of channels by two blocks of threads, of five tokens after a norm."""
    rng = np.random.default_rng(1)
    arrays = {
        "x": rng.standard_normal((5, 900)).astype(np.float32), "gain": np.ones(900, np.float32),
        "shift": np.zeros(1, np.float32), "a": rng.standard_normal((1, 450, 16, 2)).astype(np.float16),
        "out": np.zeros((5, 9), np.float32), "sums": np.zeros((2, 8, 16), np.float32), "arrived": np.zeros(1, np.int32),
    }  # fmt: skip
    scalars: dict[str, int | float] = {
        "tokens": 5, "columns": 900, "width_in": 900, "rank": 9, "norm": 1, "eps": 1e-5, "shares": 2, "each": 2,
    }  # fmt: skip
    return launched(kernel, arrays, scalars, order)["out"]


def rotate(kernel: Generated, order: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    arrays = {
        "x": rng.standard_normal((2, 128)).astype(np.float32),
        "matrix": rng.integers(-127, 128, (32, 32), dtype=np.int8),
        "scale": np.ones(1, np.float32),
    }
    return launched(kernel, arrays, {"tokens": 2, "width": 128, "heads": 4}, order)["x"]


def fused(kernel: Generated, order: int) -> np.ndarray:
    return of_fused(kernel, order, 2, 1)["y"]


def shared(kernel: Generated, order: int) -> np.ndarray:
    """By three shares of one round each, whose counter is as it was."""
    found = of_fused(kernel, order, 2, 1, shares=3)
    return found["y"] if not found["arrived"].any() else np.full_like(found["y"], np.nan)


def of_fused(kernel: Generated, order: int, blocks: int, ahead: int, shares: int = 1) -> dict[str, np.ndarray]:
    """2,560 input channels, more than two rounds, of five tokens after a norm; blocks of output channels, of which two are a
    head; of a gate and its factor as many each."""
    bits, zero, integer, group = kernel.variant.literals[-4:]
    gated = kernel.variant.kernel == "fused_activate"
    width, groups = 16 * blocks, 2560 // int(group)
    rows = width * (1 + gated)
    case = product_of(Codec("int", int(bits), int(group), symmetric=not zero), bool(integer), rows, 2560)
    arrays = {
        **case.arrays,
        "x": np.random.default_rng(1).standard_normal((5, 2560)).astype(np.float32),
        "gain": np.ones(2560, np.float32), "bias": np.ones(rows, np.float32), "y": np.zeros((5, width), np.float32),
        **{name: np.zeros(4, np.float32) for name in ("shift", "scale", "angles", "q_gain", "k_gain", "inner")},
        **{name: np.zeros(4, np.int32) for name in ("order", "tables", "slots", "places", "low_b", "arrived")},
        "sums": np.full(rows * groups * 8, np.nan, np.float32),
        "pages": np.zeros(1, np.int64), "pool": np.zeros(1, np.float16),
    }  # fmt: skip
    scalars: dict[str, int | float] = {
        "tokens": 5, "width_in": 2560, "norm": 1, "ordered": 0, "scaled": 0, "eps": 1e-5,
        "limit": 127 if integer else 0, "columns": 2560,
        "groups": groups, "chunks": 80, "stride": 1, "rows": rows, "width": width, "has_bias": 1, "add": 0, "ctas": 1,
        "each": blocks, "ahead": ahead, "shares": shares, "low_kind": 0, "rank": 0,
        "most": blocks, "first": 0, "heads": 1, "kv_heads": 0, "head_dim": 32, "head_normed": 0, "head_eps": 0, "pairs": 0,
        "layer": 0,
    }  # fmt: skip
    return launched(kernel, arrays, scalars, order)


FUSED = Variant("fused_rows", ("group", 4, False, False, 128))
ZERO = Variant("fused_rows", ("group", 4, True, False, 128))
HEADS = Variant("fused_heads", ("f16", False, *FUSED.literals))
GATED = Variant("fused_activate", ("silu", True, "group", 8, True, True, 32))
SHARES = 6
"""Barriers of a fused product after which those of its shares come."""
ATTEND, TOGETHER = (Variant("attend", each) for each in ((64, "f16", 64, False), (32, "f16", 128, True)))
LOW_RANK = Variant("low_rank", ("f16",))
SCAN = Variant("state_scan", (True, 32, True))
DRAW = Variant("draw", (MAX_COUNT, DRAW_NUMBERS))
MATVEC, MATMUL = Variant("matvec", (4, False, False, 128)), Variant("matmul", (4, False, False, 128))
MUTATIONS: list[tuple[str, Variant, Run, str, int]] = [
    ("matvec: products are added before all are there", MATVEC, product, BARRIER, 0),
    ("matvec: the next round overwrites what is not yet added", MATVEC, product, BARRIER, 1),
    ("matmul: tokens are read before others have them", MATMUL, product, BARRIER, 0),
    ("matmul: the next tokens overwrite what is still read", MATMUL, product, BARRIER, 1),
    ("matmul: tokens are read before they have come", MATMUL, product, WAIT.format(1), 0),
    ("matmul: the last tokens are read before they have come", MATMUL, product, WAIT.format(0), 0),
    ("fused: the mean is read before it is there", FUSED, fused, BARRIER, 1),
    ("fused: squares of other warps are read too early", FUSED, fused, BARRIER, 2),
    ("fused: the norm is read before it is there", FUSED, fused, BARRIER, 3),
    ("fused: the quantized input of other warps is read too early", FUSED, fused, BARRIER, 4),
    ("fused: products are added before all are there", FUSED, fused, BARRIER, 5),
    ("fused: the next block overwrites what is not yet added", FUSED, fused, BARRIER, 6),
    ("fused: a head is read before it is there", HEADS, fused, BARRIER, SHARES + 4),
    ("fused: a share is told to be there before all threads have left theirs", FUSED, shared, BARRIER, SHARES),
    ("fused: products of shares are read before all are there", FUSED, shared, BARRIER, SHARES + 2),
    ("fused: the next block overwrites what is not yet added of shares", FUSED, shared, BARRIER, SHARES + 3),
    ("fused: how many shares have ended is read too early", FUSED, shared, BARRIER, SHARES + 1),
    ("fused: a share is told to be there before others can see it", FUSED, shared, FENCE, 0),
    ("fused: other shares are read before they can be seen", FUSED, shared, FENCE, 1),
    ("fused: a share does not tell that it is there", FUSED, shared, ARRIVAL, 0),
    ("norm: sums of other warps are read too early", Variant("rms_norm"), norm, BARRIER, 0),
    ("layer norm: the mean is taken before all are added", Variant("layer_norm"), layer_norm, BARRIER, 0),
    ("layer norm: squares of other warps are read too early", Variant("layer_norm"), layer_norm, BARRIER, 1),
    ("transform: numbers are read before others have them", Variant("butterflies"), transform, BARRIER, 0),
    ("transform: the next level reads what is not yet written", Variant("butterflies"), transform, BARRIER, 1),
    ("token: ranges of other warps are read too early", Variant("quantize_input_token", (True, 128)), token, BARRIER, 0),
    ("floats: parts are added before all are there", Variant("float_product", ("f32",)), float_product, BARRIER, 0),
    ("low rank: squares of other warps are read too early", LOW_RANK, low_rank, BARRIER, 2),
    ("low rank: the next round overwrites what is still read", LOW_RANK, low_rank, BARRIER, 4),
    ("low rank: channels are read before others have them", LOW_RANK, low_rank, BARRIER, 5),
    ("low rank: sums of other threads are added too early", LOW_RANK, low_rank, BARRIER, 6),
    ("low rank: how many blocks have ended is read too early", LOW_RANK, low_rank, BARRIER, 8),
    ("low rank: a share is told to be there before others can see it", LOW_RANK, low_rank, FENCE, 0),
    ("low rank: other shares are read before they can be seen", LOW_RANK, low_rank, FENCE, 1),
    ("low rank: a share does not tell that it is there", LOW_RANK, low_rank, ARRIVAL, 0),
    ("rotation: integers of other lanes are read too early", Variant("head_rotate", (32,)), rotate, WARP, 0),
    ("attend: the query is read before it is whole", ATTEND, attend, BARRIER, 0),
    ("attend: scores of other warps are read too early", ATTEND, attend, BARRIER, 1),
    ("attend: weights of other warps are read too early", ATTEND, attend, BARRIER, 2),
    ("attend: how a part is added is read too early", ATTEND, attend, BARRIER, 3),
    ("attend: how many parts have come is read too early", ATTEND, attend, BARRIER, 6),
    ("attend: how parts of other blocks are added is read too early", ATTEND, attend, BARRIER, 7),
    ("attend: how parts are added changes before it is read", ATTEND, attend, BARRIER, 8),
    ("attend: totals of all parts are read too early", ATTEND, attend, BARRIER, 9),
    ("attend: a part is told to be there before others can see it", ATTEND, attend, FENCE, 0),
    ("attend: other parts are read before they can be seen", ATTEND, attend, FENCE, 1),
    ("attend: a part does not tell that it is there", ATTEND, attend, ARRIVAL, 0),
    ("attend together: the query is read before it is whole", TOGETHER, attend_together, BARRIER, 0),
    ("attend together: scores of other warps are read too early", TOGETHER, attend_together, BARRIER, 1),
    ("attend together: weights of other warps are read too early", TOGETHER, attend_together, BARRIER, 2),
    ("attend together: how a part is added is read too early", TOGETHER, attend_together, BARRIER, 3),
    ("attend together: totals of other warps are read too early", TOGETHER, attend_together, BARRIER, 4),
    ("convolution: a row overwrites one that is still read", Variant("short_conv", (False,)), short_conv, BARRIER, 0),
    ("row before: a row overwrites one that is still read", Variant("row_before", (True,)), row_before, BARRIER, 0),
    ("scan: keys of other warps are read too early", SCAN, state_scan, BARRIER, 0),
    ("scan: products of other warps are added too early", SCAN, state_scan, BARRIER, 1),
    ("scan: what rows added is read before it is there", SCAN, state_scan, BARRIER, 2),
    ("scan: the next rows overwrite what is still read", SCAN, state_scan, BARRIER, 3),
    ("largest: those of other warps are read too early", Variant("largest", (True, 4096)), largest, BARRIER, 0),
    ("draw: weights of other lanes are read too early", DRAW, draw, BARRIER, 0),
    ("draw: a weight is divided while it is still added", DRAW, draw, BARRIER, 1),
    ("draw: probabilities of other lanes are read too early", DRAW, draw, BARRIER, 2),
    ("draw: a probability is divided while it is still added", DRAW, draw, BARRIER, 3),
    ("draw: what was cut is read too early", DRAW, draw, BARRIER, 4),
]


SHARE = ("matvec: products are added before all are there",)
CASES = [pytest.param(*rest, id=name, marks=() if name in SHARE else pytest.mark.exhaustive) for name, *rest in MUTATIONS]


def without(text: str, line: str, place: int) -> str:
    """The text of a kernel without the `place`-th match of `line`, a regular expression."""
    found = list(re.finditer(line, text))
    assert len(found) > place, f"only {len(found)} of {line}"
    return text[: found[place].start()] + text[found[place].end() :]


RUNS = list(dict.fromkeys((variant, run) for _, variant, run, *_ in MUTATIONS))


@cache
def right(variant: Variant, run: Run) -> np.ndarray:
    """What the intact kernel computes, in every order of threads."""
    (intact,) = build.kernels([variant])
    first, *others = (run(intact, order) for order in ORDERS)
    assert np.isfinite(first).all() and all(np.array_equal(other, first) for other in others)
    return first


@pytest.mark.parametrize(("variant", "run", "line", "place"), CASES)
def test_a_removed_line_is_noticed(variant: Variant, run: Run, line: str, place: int) -> None:
    (intact,) = build.kernels([variant])
    mutated, wanted = replace(intact, text=without(intact.text, line, place)), right(variant, run)
    assert any(noticed(mutated, run, order, wanted) for order in ORDERS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("variant", "run"), [(LOW_RANK, low_rank), (ATTEND, attend)], ids=["low rank", "attend"])
def test_a_fence_before_the_barrier_is_not_enough(variant: Variant, run: Run) -> None:
    """What other threads wrote is promised to be seen only if the thread that tells of it fences after they met."""
    (intact,) = build.kernels([variant])
    barrier, fence = re.findall(BARRIER, intact.text)[0], re.findall(FENCE, intact.text)[0]
    at = intact.text.index(fence)
    before = intact.text.rindex(barrier, 0, at)
    moved = intact.text[:before] + fence + "\n" + intact.text[before:at] + intact.text[at + len(fence) :]
    with pytest.raises(DeviceError, match="a counter is raised without a fence before it"):
        run(replace(intact, text=moved), FORWARD)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("variant", "run"), RUNS, ids=[f"{run.__name__}-{variant.symbol}" for variant, run in RUNS])
def test_every_access_is_within_its_memory_and_aligned(variant: Variant, run: Run) -> None:
    (intact,) = build.kernels([variant])
    assert np.array_equal(run(intact, CHECKED), right(variant, run))


@pytest.mark.exhaustive
@pytest.mark.parametrize("shares", [2, 3])
@pytest.mark.parametrize("variant", [ZERO, HEADS, GATED], ids=lambda variant: variant.symbol)
def test_shares_of_the_input_channels_give_the_bits_of_one_block_of_threads(variant: Variant, shares: int) -> None:
    """Rounds of which one share has fewer than the others, and a last round that is not whole."""
    (intact,) = build.kernels([variant])
    one, several = (of_fused(intact, BACKWARD, 2, 3, shares=count)["y"] for count in (1, shares))
    assert np.array_equal(one, several) and np.isfinite(one).all() and len(np.unique(one)) > 64


@pytest.mark.exhaustive
@pytest.mark.parametrize("ahead", [1, 4, 7])
@pytest.mark.parametrize("variant", [FUSED, ZERO], ids=lambda variant: variant.symbol)
def test_every_line_of_weights_is_asked_for_once(variant: Variant, ahead: int) -> None:
    """By a kernel whose prefetches count in the first word of a line of 128 bytes; three rounds of four output blocks."""
    (intact,) = build.kernels([variant])
    counting, found = re.subn(r"asm volatile\(.prefetch.*\);", "++*(unsigned *)__addr;", intact.text)
    assert found == 1
    before, after = (of_fused(kernel, FORWARD, 4, ahead) for kernel in (intact, replace(intact, text=counting)))
    for name in ("q", "s", "z")[: 2 + (variant is ZERO)]:
        lines = [arrays[name].reshape(-1).view(np.uint32).reshape(-1, 32) for arrays in (before, after)]
        counted = lines[1][:, 0] - lines[0][:, 0]
        # A line of zero points has those of two rounds, or of two output blocks.
        assert counted.min() == 1 and counted.max() == (2 if name == "z" else 1), (name, counted)
        assert np.array_equal(lines[1][:, 1:], lines[0][:, 1:])


def noticed(mutated: Generated, run: Run, order: int, right: np.ndarray) -> bool:
    try:
        return not np.array_equal(run(mutated, order), right)
    except DeviceError:
        return True
