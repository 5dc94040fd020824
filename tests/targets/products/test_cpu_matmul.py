"""Products of the cpu target against numpy: of integers in groups of whole chunks, and of floats."""

import numpy as np
import pytest

from edgeq.format.codec import Codec, pack_groups, pack_integers
from edgeq.format.quantization import activation_limit
from edgeq.format.records import Weight
from edgeq.targets.target import Options
from tests.targets.cases import (
    FLOAT_CODECS,
    HERE,
    INTEGER_CODECS,
    ISAS,
    Arrays,
    case,
    integers,
    matrix,
    product,
    product_cases,
    run,
    weight,
)
from tests.targets.products.integer_product import check_extremes, check_product

LONGER = [codec for codec in INTEGER_CODECS if codec.group_size in (32, 64, 128)]
"""Groups of whole chunks; the others have kernels of their own, and a file, which runs beside this one."""


@pytest.mark.parametrize(("isa", "codec", "mode"), product_cases(LONGER))
def test_integer_product_equals_the_reference(isa, codec, mode):
    check_product(isa, codec, mode)


@pytest.mark.parametrize(("isa", "codec", "mode"), product_cases([codec for codec in LONGER if codec.group_size == 128]))
def test_extreme_values_do_not_overflow(isa, codec, mode):
    check_extremes(isa, codec, mode)


@pytest.mark.parametrize("isa", ISAS)
def test_a16_is_as_exact_as_its_rounding_allows(isa):
    """15-bit activations: the error is below half a step of the block's largest value, summed over the weights."""
    rng, codec, arrays = np.random.default_rng(3), Codec("int", 4, 64, False), Arrays()
    w = weight(arrays, rng, codec, 64, 512)
    x = (rng.standard_normal((7, 512)) * np.exp(2 * rng.standard_normal((1, 512)))).astype(np.float32)
    y = run("cpu", product(arrays, x, w), arrays, 7, Options("a16", 2, isa))
    dense = matrix(arrays, w)
    step = np.abs(x.reshape(7, 8, 64)).max(2) / 32639
    bound = 0.51 * step @ np.abs(dense).reshape(64, 8, 64).sum(2).T + 1e-6 * (np.abs(x) @ np.abs(dense).T)
    assert (np.abs(y - x.astype(np.float64) @ dense.T.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize(
    ("isa", "bits"),
    [case(isa, bits, common=bits == 4 and isa == HERE[0], id=f"{isa}-{bits}") for isa in HERE for bits in range(2, 9)],
)
def test_sums_of_a16_are_those_of_its_integers(isa, bits):
    """Scales are powers of two, so results are the integer sums to the bit, in tiles of every size."""
    rng, arrays, limit, codec = np.random.default_rng(bits), Arrays(), 256 * 127 + 127, Codec("int", bits, 128)
    q = rng.integers(0, 1 << bits, (40, 128), dtype=np.uint8)
    q[::3], q[1::3] = 0, (1 << bits) - 1
    one = arrays.add(pack_groups(np.ones((40, 1), np.float16)), "f16")
    w = Weight(codec, 40, 128, {"q": arrays.add(pack_integers(q, bits), "u8"), "scale": one})
    x = rng.integers(-limit, limit + 1, (25, 128))
    x[0], x[3], x[4], x[5] = limit, -limit, -128, 256 * rng.integers(-127, 127, 128) + 128
    x[:, 0] = limit
    graph = product(arrays, (x / 2.0**15).astype(np.float32), w)
    expected = (x @ (q.astype(np.int64) - codec.center).T).astype(np.float32) / np.float32(2**15)
    for count in (1, 2, 3, 4, 5, 12, 13, 16, 25):
        y = run("cpu", graph, arrays, count, Options("a16", 2, isa))
        assert np.array_equal(y, expected[:count]), count


@pytest.mark.parametrize("isa", ISAS)
def test_a8_quantizes_activations_as_the_reference_does(isa):
    rng, codec, arrays = np.random.default_rng(4), Codec("int", 4, 32), Arrays()
    w = weight(arrays, rng, codec, 48, 256)
    x = rng.standard_normal((9, 256)).astype(np.float32)
    x[3] = 0
    graph = product(arrays, x, w)
    y = run("cpu", graph, arrays, 9, Options("a8", 1, isa))
    oracle = run("reference", graph, arrays, 9, Options("a8"))
    # An activation exactly between two integers may fall to either side: one step of one channel, rarely.
    steps = np.abs(y - oracle) / (np.abs(x).max() / activation_limit(codec, "a8") * np.abs(matrix(arrays, w)).max())
    assert steps.max() < 1.01 and np.mean(steps > 1e-3) < 0.05
    assert np.array_equal(y[3], np.zeros(48)) and np.array_equal(oracle[3], np.zeros(48))


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("codec", FLOAT_CODECS, ids=lambda c: c.name)
def test_float_product_equals_the_reference(codec, isa):
    rng = np.random.default_rng(5)
    for rows, columns in ((17, 33), (16, 64), (40, 1), (3, 2)):
        arrays = Arrays()
        w = weight(arrays, rng, codec, rows, columns)
        x = rng.standard_normal((18, columns)).astype(np.float32)
        graph = product(arrays, x, w)
        expected = x.astype(np.float64) @ matrix(arrays, w).T.astype(np.float64)
        size = np.abs(x) @ np.abs(matrix(arrays, w)).T + 1e-6
        many = run("cpu", graph, arrays, 18, Options("a8", 2, isa))
        assert np.max(np.abs(many - expected) / size) < 1e-6
        assert np.array_equal(run("cpu", graph, arrays, 1, Options("a8", 1, isa))[0], many[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_result_does_not_depend_on_the_number_of_threads(threads):
    rng, arrays = np.random.default_rng(6), Arrays()
    w = weight(arrays, rng, Codec("int", 4, 128), 70, 256)
    x = rng.standard_normal((30, 256)).astype(np.float32)
    graph = product(arrays, x, w)
    y, alone = (run("cpu", graph, arrays, 30, Options("a8", n)) for n in (threads, 1))
    assert np.array_equal(y, alone)


@pytest.mark.parametrize(
    "codecs",
    [
        pytest.param(
            [c for c in INTEGER_CODECS if (c.bits, c.group_size) in ((4, 32), (8, 0))] + FLOAT_CODECS, id="of four bits"
        ),
        case([c for c in INTEGER_CODECS if c.group_size in (0, 32)], common=False, id="of 32 and of rows"),
        case([c for c in INTEGER_CODECS if c.group_size not in (0, 32)], common=False, id="of other sizes"),
    ],
)
def test_tied_embedding_of_every_codec_equals_its_dequantized_rows(codecs):
    from edgeq.format.records import LinearSpec
    from edgeq.targets.graph import CacheSpec, Embed, Graph, Linear, Select

    rng = np.random.default_rng(7)
    for codec in codecs:
        columns, arrays = max(codec.group_size, 16) * 3, Arrays()
        table = weight(arrays, rng, codec, 19, columns)
        # An identity matrix behind the embedding shows it unchanged.
        identity = Codec("f32")
        eye = LinearSpec("eye", (_identity(arrays, identity, columns),))
        operations = (Embed(-1, LinearSpec("head", (table,)), "x"), Select(-1, ("x",)), Linear(-1, "x", eye, "y"))
        graph = Graph({"x": columns, "y": columns}, operations, "y", (CacheSpec(1, 2, 2),))
        y = run("cpu", graph, arrays, 19, Options("a16", 2))
        assert np.array_equal(y, matrix(arrays, table)), codec.name


def _identity(arrays, codec, size):
    from edgeq.format.codec import pack_floats
    from edgeq.format.records import Weight

    return Weight(codec, size, size, {"q": arrays.add(pack_floats(np.eye(size, dtype=np.float32), codec.kind), codec.kind)})


def test_extreme_integers_reach_both_ends():
    """The generator of these tests does what its tests rely on."""
    rng = np.random.default_rng(0)
    for bits in range(2, 9):
        q, _, zero = integers(rng, Codec("int", bits, 16, False), 64, 64, "random")
        assert q.min() == 0 and q.max() == (1 << bits) - 1 and {0, (1 << bits) - 1} <= set(zero.ravel().tolist())
