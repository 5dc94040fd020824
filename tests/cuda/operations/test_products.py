"""Products of the CUDA target against numpy, and the same bits for a token row whatever runs beside it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.quantization import quantize_blocks
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.pack import Generated
from tests.cuda.emulated import BACKWARD, FORWARD, SHUFFLED
from tests.cuda.launching import GROUPS, Product, in_half, product_of

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

MAX_A8 = 120
TOLERANCES = {True: 2e-6, False: 1e-3}
"""As shares of the size of the terms: integers are exact but for the scales; f16 has 11 bits."""
SHARE = [
    (Codec("int", 4, 128, False), False),
    (Codec("int", 4, 128, False), True),
    (Codec("int", 3, 16, True), False),
    (Codec("s4", 2, 32), True),
    (Codec("trellis", 2, 32), False),
]
"""What `make test` runs; the rest is for `make test-cuda`."""
ALL = [
    (Codec("int", bits, group, symmetric), integer)
    for bits, group, symmetric, integer in itertools.product(range(2, 9), (*GROUPS, 0), (True, False), (True, False))
    if in_half(bits, not symmetric, integer, group)
]
ALL += [each for each in SHARE if each[0].kind == "int" and each not in ALL]
OTHERS = [
    *(Codec("half", bits, group) for bits, group in zip(range(2, 9), (16, 32, 0, 128, 64, 32, 16), strict=True)),
    *(Codec("s4", bits, group) for bits, group in ((2, 32), (3, 16), (4, 128), (8, 32))),
    *(Codec("table", bits, group, wide=group == 16) for bits in range(1, 5) for group in (16, (64, 32, 128, 0)[bits - 1])),
    *(Codec("trellis", bits, group) for bits in range(1, 4) for group in (16, (128, 32, 64)[bits - 1])),
]
"""What else lies beside integers, in all that changes how they are read: their bits, and whether groups have 16 channels; of
bytes and f16 one in turn, and of what `make test` runs both."""
ALL += [
    (codec, integer)
    for i, codec in enumerate(OTHERS)
    for integer in (False, True)
    if integer == bool(i % 2) or codec in [share[0] for share in SHARE]
]


def case(codec: Codec, integer: bool):
    marks = () if (codec, integer) in SHARE else (pytest.mark.exhaustive,)
    return pytest.param(codec, integer, marks=marks, id=f"{codec.name}-{'int8' if integer else 'f16'}".replace(" ", "-"))


CASES = [case(*each) for each in ALL]
VALUES = [
    pytest.param(
        *each.values, values, id=f"{each.id}-{values}", marks=(*each.marks, *(pytest.mark.exhaustive,) * (values != "random"))
    )
    for each in CASES
    for values in ("random", "least", "most")
    # What the extremes can break, the size of a sum, is largest in the longest group and most often cut in the shortest.
    if values == "random" or each.values[0].group_size in (0, 16)
]


def generated(product: Product) -> list[Generated]:
    return build.kernels([product.variant(kernel) for kernel in ("quantize_input", "matvec", "matmul")])


def inputs(tokens: int, columns: int, seed: int = 1) -> np.ndarray:
    """Rows of sizes from 1e-6 to 1e6, with a row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, columns)) * 10.0 ** rng.integers(-6, 7, (tokens, 1))
    x[1:2] = 0
    return x.astype(np.float32)


def wanted(product: Product, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W x in float64 and the size of its terms, sum |W| |x|."""
    seen = quantize_blocks(x, product.group, MAX_A8) if product.integer else x
    w = product.matrix.astype(np.float64)
    return seen.astype(np.float64) @ w.T, np.abs(seen).astype(np.float64) @ np.abs(w).T


@pytest.mark.parametrize(("codec", "integer", "values"), VALUES)
def test_a_product_is_that_of_numpy_for_few_and_for_many(codec: Codec, integer: bool, values: str) -> None:
    """Odd numbers of output channels, input channels and tokens, so that every edge is cut somewhere."""
    tokens, rows, columns = 19, 37, 300 - (values == "most") * 131
    product = product_of(codec, integer, rows, columns, values)
    quantize_input, matvec, matmul = generated(product)
    x = inputs(tokens, columns)
    quantized = product.quantized(quantize_input, x, MAX_A8)
    exact, size = wanted(product, x)
    results = [
        product.product(kernel, quantized, tokens, np.full((tokens, rows), np.nan, np.float32), None)
        for kernel in (matvec, matmul)
    ]
    assert np.all(np.abs(results[0] - exact) <= TOLERANCES[integer] * size)
    assert np.array_equal(*results)


@pytest.mark.parametrize(("codec", "integer"), [case(*each) for each in ALL if each[0] in [share[0] for share in SHARE]])
def test_a_row_has_the_same_bits_alone_and_among_others(codec: Codec, integer: bool) -> None:
    """Alone by the kernel for few rows, among 8, 17, 64, 70 and 200 by both; in every order of threads."""
    rows, columns = 21, 420
    product = product_of(codec, integer, rows, columns)
    quantize_input, matvec, matmul = generated(product)
    x, bias = inputs(200, columns), np.random.default_rng(2).standard_normal(rows).astype(np.float32)
    y = np.random.default_rng(3).standard_normal((200, rows)).astype(np.float32)

    def run(first: int, count: int, kernel: Generated, order: int = FORWARD) -> np.ndarray:
        part = x[first : first + count]
        quantized = product.quantized(quantize_input, part, MAX_A8, order)
        return product.product(kernel, quantized, count, y[first : first + count], bias, order)

    whole = run(0, 200, matmul)
    exact, size = wanted(product, x)
    assert np.all(np.abs(whole - (exact + bias + y)) <= TOLERANCES[integer] * (size + np.abs(bias) + np.abs(y)))
    for count in (1, 8, 17, 64, 70):
        for kernel in (matvec, matmul):
            assert np.array_equal(run(200 - count, count, kernel), whole[200 - count :]), count
    for order in (BACKWARD, SHUFFLED):
        assert np.array_equal(run(183, 17, matvec, order), whole[183:])
        assert np.array_equal(run(130, 70, matmul, order), whole[130:])


@pytest.mark.parametrize(("codec", "integer"), [case(*each) for each in SHARE[:2]])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_becomes_nan_and_no_other(codec: Codec, integer: bool, bad: float) -> None:
    product = product_of(codec, integer, 16, 256)
    quantize_input, matvec, matmul = generated(product)
    x = inputs(4, 256)
    x[2, 200] = bad
    quantized = product.quantized(quantize_input, x, MAX_A8)
    for kernel in (matvec, matmul):
        y = product.product(kernel, quantized, 4, np.full((4, 16), np.nan, np.float32), None)
        assert np.isnan(y[2]).all() and np.isfinite(y[[0, 1, 3]]).all()


@pytest.mark.parametrize("group", [16, 128])
def test_the_integers_of_the_form_are_those_of_the_reference(group: int) -> None:
    """Code by code, and their sums: what a last bit turns would hide in the tolerance of a product."""
    columns = 260
    product = product_of(Codec("int", 4, group), True, 16, columns)
    x = inputs(9, columns)
    quantized = product.quantized(generated(product)[0], x, MAX_A8)
    padded, groups = 64, -(-columns // group)
    codes = quantized["data"].view(np.int8).reshape(-1, padded, 32).transpose(1, 0, 2).reshape(padded, -1)[:9, :columns]
    scales, sums = (quantized[name].reshape(groups, padded).T[:9] for name in ("xs", "xn"))
    restored = codes * np.repeat(scales, group, axis=1)[:, :columns]
    assert np.array_equal(restored.astype(np.float32), quantize_blocks(x, group, MAX_A8))
    whole = np.pad(codes.astype(np.int32), ((0, 0), (0, groups * group - columns))).reshape(9, groups, group).sum(axis=2)
    assert np.array_equal(sums, whole)
