"""Products by pairs of channels: bit by bit what plain ones give, at the limits of bytes too."""

import ctypes

import numpy as np
import pytest

from edgeq.format.codec import Codec
from edgeq.format.records import Activation, LinearSpec
from edgeq.system import machine
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import address
from edgeq.targets.cpu.kernels.args import A8
from edgeq.targets.cpu.kernels.rows import quantize
from edgeq.targets.cpu.lowering.layout import Layout, QuantizedActivation
from edgeq.targets.graph import CacheSpec, Embed, Graph, Linear, Select
from edgeq.targets.target import Options
from tests.targets.cases import Arrays, case, matrix, product, run, weight

PAIRS, PLAIN = "avx512-pairs", "avx512-vnni"
NEEDS = next(isa.needs for isa in all_isas() if isa.name == PAIRS)
pytestmark = pytest.mark.skipif(not machine.cpu().features >= NEEDS, reason="a processor without AVX-512 VNNI")


@pytest.mark.parametrize(
    ("group", "symmetric", "mode"),
    [
        case(group, symmetric, mode, common=(i + symmetric) % 2 == (mode == "a8"), id=f"{group}-{symmetric}-{mode}")
        for i, group in enumerate((16, 32, 64, 128, 0))
        for symmetric in (True, False)
        for mode in ("a8", "a4")
    ],
)
def test_they_give_the_bits_of_plain_products(group: int, symmetric: bool, mode: str) -> None:
    rng, codec = np.random.default_rng(group), Codec("int", 4, group, symmetric)
    # One block, two, an odd number of them with a part of one, more than stay in the cache at once; 12, 24 and 31 rows.
    for rows, columns, count in ((16, 256, 12), (32, 128, 24), (90, 384, 31), (600, 128, 31)):
        arrays = Arrays()
        w = weight(arrays, rng, codec, rows, columns)
        x = (rng.standard_normal((count, columns)) * np.exp(rng.standard_normal((1, columns)))).astype(np.float32)
        x[2] = 0
        graph = product(arrays, x, w, rng.standard_normal(rows).astype(np.float32))
        plain, pairs = (run("cpu", graph, arrays, count, Options(mode, 2, isa)) for isa in (PLAIN, PAIRS))  # type: ignore[arg-type]
        assert np.array_equal(plain, pairs), (rows, columns, count)


def test_columns_that_do_not_fill_a_chunk_and_scales_per_row_of_activations() -> None:
    rng, codec, arrays = np.random.default_rng(1), Codec("int", 4), Arrays()
    for columns in (20, 36, 300):
        w = weight(arrays, rng, codec, 40, columns)
        x = rng.standard_normal((13, columns)).astype(np.float32)
        layer = LinearSpec("layer", (w,), activation=Activation(4, symmetric=False))
        table = arrays.add(x, "f32")
        operations = (Embed(-1, table, "x"), Select(-1, ("x",)), Linear(-1, "x", layer, "y"))
        graph = Graph({"x": columns, "y": 40}, operations, "y", cache=(CacheSpec(1, 2, 2),))
        plain, pairs = (run("cpu", graph, arrays, 13, Options("a8", 1, isa)) for isa in (PLAIN, PAIRS))
        assert np.array_equal(plain, pairs), columns


@pytest.mark.parametrize("values", ["least", "most"])
def test_bytes_at_their_limits(values: str) -> None:
    """Weights of -8 or 7, activations of 120 of either sign in the even quads and in the odd ones."""
    rng, arrays = np.random.default_rng(2), Arrays()
    w = weight(arrays, rng, Codec("int", 4, 128), 16, 256, values)
    even = np.where(np.arange(256) // 4 % 2, 1, -1)
    signs = np.stack([np.ones(256), -np.ones(256), even, -even] * 3)
    x = signs.astype(np.float32)
    y = run("cpu", product(arrays, x, w), arrays, 12, Options("a8", 1, PAIRS))
    assert np.allclose(y, x.astype(np.float64) @ matrix(arrays, w).T, atol=1e-4)


@pytest.mark.parametrize(("factory", "literals"), [(quantize.quantize, (12,)), (quantize.quantize_tokens, (12, 0))])
def test_the_sums_of_the_activations_are_those_of_their_definition(factory: object, literals: tuple[int, ...]) -> None:
    count, columns, block = 12, 256, 128
    x = np.random.default_rng(3).standard_normal((count, columns)).astype(np.float32)
    data = np.zeros(count * columns + 64, np.int8)
    numbers, rows = np.zeros((3, count * columns // block), np.int32), np.array([count], np.int64)
    layout = Layout(A8, columns, block, 120, winograd=True)
    form = QuantizedActivation(layout, data.ctypes.data, *(n.ctypes.data for n in numbers))
    args = quantize.QuantizeArgs(rows=rows.ctypes.data, x=x.ctypes.data, x_stride=x.strides[0], quantized=form.args())
    record = np.array(args.record(), np.int64)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address(factory, *literals))(record.ctypes.data, 0, 1, 0)  # type: ignore[arg-type]
    quads = data[: count * columns].reshape(2, block // 8, 2, count, 4).astype(np.int64)
    even, odd = quads[:, :, 0] & 255, quads[:, :, 1]
    quads[:, :, 0], quads[:, :, 1] = even - 120, odd + 8
    expected = ((quads[:, :, 0] + 128) * quads[:, :, 1]).sum(axis=(1, 3))
    assert np.array_equal(numbers[2].reshape(2, count), expected) and np.abs(quads).max() == 120
    assert np.array_equal(numbers[1].reshape(2, count), quads.sum(axis=(1, 2, 4)))
