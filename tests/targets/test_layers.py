"""Operations that not every family has: the cpu target against the reference, and the reference against formulas by hand."""

import math

import numpy as np
import pytest

from edgeq.targets.family_operations import (
    ArrayScale,
    Gate,
    Limit,
    RowMean,
    ScaleAdd,
    ScaleShift,
    ShareScale,
    SoftCap,
    ValueNorm,
)
from edgeq.targets.graph import Activate, Attention, CacheWrite, LayerNorm, NormAdd, PositionAdd, RopeRotate, Scale
from tests.targets.cases import Arrays
from tests.targets.test_cpu_kernels import both, shown

ROWS = 5


def stored(arrays, values, dtype="f32"):
    if dtype == "bf16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return arrays.add(bits, "bf16"), (bits.astype(np.uint32) << 16).view(np.float32)
    kept = values.astype({"f32": np.float32, "f16": np.float16}[dtype])
    return arrays.add(kept, dtype), kept.astype(np.float32)


@pytest.mark.parametrize("width", [16, 40, 48, 100, 256])
@pytest.mark.parametrize("offset", [0, 300], ids=["centered", "far from zero"])
def test_layer_norm(width, offset):
    rng, arrays = np.random.default_rng(width), Arrays()
    x = rng.standard_normal((ROWS, width)) * 3 + offset
    (gain, g), (bias, b) = (stored(arrays, rng.standard_normal(width)) for _ in range(2))
    graph = shown(arrays, x, [LayerNorm(0, "x", gain, bias, 1e-5, "n")], "n", {"n": width, "_dim": 2})
    oracle, y = both(graph, arrays, ROWS)
    wanted = x.astype(np.float32).astype(np.float64)
    wanted = (wanted - wanted.mean(1, keepdims=True)) / np.sqrt(wanted.var(1, keepdims=True) + 1e-5) * g + b
    assert np.abs(oracle - wanted).max() < 1e-5
    assert np.abs(y - oracle).max() < (1e-5 if offset == 0 else 1e-3)


@pytest.mark.parametrize("width", [16, 40, 48, 256])
def test_norm_add_leaves_the_residual_under_it(width):
    rng, arrays = np.random.default_rng(width), Arrays()
    x = rng.standard_normal((ROWS, width)) * 10
    gain, g = stored(arrays, rng.standard_normal(width))
    operations = [Scale(0, "x", 0.5, "x"), NormAdd(0, "x", gain, 1e-5, "x")]
    oracle, y = both(shown(arrays, x, operations, "x", {"x": width, "_dim": 2}), arrays, ROWS)
    half = x.astype(np.float32) / 2
    wanted = half + half / np.sqrt((half.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * g
    assert np.abs(oracle - wanted).max() < 1e-5
    assert np.abs(y - oracle).max() < 1e-5


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("width", [16, 40])
def test_scale_and_learned_positions(dtype, width):
    rng, arrays = np.random.default_rng(width), Arrays()
    x = rng.standard_normal((ROWS, width))
    table, rows = stored(arrays, rng.standard_normal((9, width)), dtype)
    operations = [Scale(0, "x", 11.3137085, "x"), PositionAdd(0, "x", table)]
    oracle, y = both(shown(arrays, x, operations, "x", {"x": width, "_dim": 2}), arrays, ROWS, [2, 3])
    wanted = x.astype(np.float32) * np.float32(11.3137085) + rows[:ROWS]
    assert np.array_equal(oracle, wanted.astype(np.float32)) and np.abs(y - oracle).max() < 1e-5


def test_geglu_over_the_whole_range_of_floats():
    gates = np.concatenate([np.linspace(-60, 60, 1000), [-1e20, -1e9, 1e9, 1e20], np.linspace(-4, 4, 1044)])
    x = np.concatenate([gates, np.full(len(gates), 1.5)])[None].repeat(3, 0)
    arrays, width = Arrays(), len(gates)
    oracle, y = both(
        shown(arrays, x, [Activate(0, "x", width, "s", "gelu_pytorch_tanh")], "s", {"s": width, "_dim": 2}), arrays, 3
    )
    wanted = [1.5 * g / 2 * (1 + math.tanh(min(max(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3), -40), 40))) for g in gates]
    assert np.isfinite(y).all()
    for found in (oracle, y):
        assert (np.abs(found[0] - wanted) <= 1e-6 * np.maximum(1, np.abs(wanted))).all()


def test_relu():
    x = np.concatenate([np.linspace(-9, 9, 47), [0.0]])[None].repeat(4, 0)
    arrays = Arrays()
    for function, power in (("relu", 1), ("relu2", 2)):
        operations = [Activate(0, "x", 48, "s", function, False)]
        oracle, y = both(shown(arrays, x, operations, "s", {"s": 48, "_dim": 2}), arrays, 4)
        wanted = np.maximum(x.astype(np.float32), 0) ** power
        assert np.array_equal(oracle, wanted) and np.array_equal(y, oracle), function


@pytest.mark.parametrize("gated", [False, True])
def test_the_activations_of_towers(gated):
    x = np.concatenate([np.linspace(-12, 12, 1021), [-1e20, -1e9, 1e9]])[None].repeat(3, 0)
    arrays, width = Arrays(), 512 if gated else 1000
    for function, scale in (("gelu", None), ("quick_gelu", 1.702)):
        graph = shown(arrays, x, [Activate(0, "x", width, "s", function, gated)], "s", {"s": width, "_dim": 2})
        oracle, y = both(graph, arrays, 3)
        inner = x[0, :width]
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(-scale * inner)) if scale else [0.5 * math.erfc(-v / math.sqrt(2)) for v in inner]
        wanted = inner * share * (x[0, 512:] if gated else 1)
        for found in (oracle, y):
            error = np.abs(found[0] - wanted) / np.maximum(np.abs(wanted), 1)
            assert error.max() < 4e-6 * (12 if gated else 1), function


@pytest.mark.parametrize("width", [16, 48, 500])
def test_a_clamped_swiglu_limits_gates_above_and_ups_on_both_sides(width):
    x = np.random.default_rng(width).standard_normal((5, 2 * width)) * 3
    x[0, [0, 1, 2]], x[1, [width, width + 1, width + 2]] = (-1e30, 1e30, 2.0), (-1e30, 1e30, -2.0)
    arrays, (alpha, limit) = Arrays(), (1.3, 2.0)
    graph = shown(arrays, x, [Activate(0, "x", width, "s", clamp=(alpha, limit))], "s", {"s": width, "_dim": 2})
    g, u = np.minimum(x[:, :width], limit), np.clip(x[:, width:], -limit, limit)
    with np.errstate(over="ignore"):
        wanted = g / (1 + np.exp(-alpha * g)) * (u + 1)
    for found in both(graph, arrays, 5):
        assert np.abs(found - wanted).max() < 4e-6 * limit * (limit + 1)
    x[2, 3], x[3, width + 3] = np.nan, np.nan
    arrays = Arrays()
    graph = shown(arrays, x, [Activate(0, "x", width, "s", clamp=(alpha, limit))], "s", {"s": width, "_dim": 2})
    for found in both(graph, arrays, 5):
        assert np.isnan(found).all(axis=1).tolist() == np.isnan(found).any(axis=1).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("dim", [16, 18, 40])
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "beside"])
def test_values_are_normed_without_a_gain(dim, apart):
    """Beside: what they are made of stays, as keys do."""
    rng, arrays, heads = np.random.default_rng(dim), Arrays(), 3
    x = rng.standard_normal((ROWS, 2 * heads * dim)) * 10
    begin = heads * dim if apart else 0
    operations = [ValueNorm(0, "x", 0, begin, heads, dim, 1e-2)]
    oracle, y = both(shown(arrays, x, operations, "x", {"x": x.shape[1], "_dim": 2}), arrays, ROWS, [2, 3])
    wanted = x.astype(np.float32).reshape(ROWS, 2 * heads, dim).astype(np.float64)
    normed = wanted[:, :heads] / np.sqrt((wanted[:, :heads] ** 2).mean(2, keepdims=True) + 1e-2)
    wanted[:, begin // dim : begin // dim + heads] = normed
    for found in (oracle, y):
        assert np.abs(found - wanted.reshape(ROWS, -1)).max() < 1e-5


@pytest.mark.parametrize(("width", "limited"), [(16, 16), (40, 24), (500, 490)])
def test_a_limit_leaves_what_is_within_it_and_what_is_beside_it(width, limited):
    x, arrays = np.random.default_rng(width).standard_normal((ROWS, width)).astype(np.float32) * 3, Arrays()
    x[0, :4] = -np.inf, np.inf, -1e30, 1e30
    x[1, 3] = np.nan
    wanted = np.concatenate([x[:, :limited].clip(-2.5, 2.5), x[:, limited:]], axis=1)
    graph = shown(arrays, x, [Limit(0, "x", 0, limited, -2.5, 2.5, "x")], "x", {"x": width, "_dim": 2})
    for found in both(graph, arrays, ROWS, [2, 3]):
        # What shows the buffer multiplies it by a matrix.
        assert np.isnan(found).all(axis=1).tolist() == [False, True, False, False, False]
        assert np.array_equal(np.delete(found, 1, 0), np.delete(wanted, 1, 0))


@pytest.mark.parametrize("width", [16, 40, 500])
def test_a_cap_limits_what_is_far_beyond_it_and_leaves_what_is_small(width):
    x = np.random.default_rng(width).standard_normal((ROWS, width)) * 3
    x[0, :6] = -1e30, 1e30, -1e4, 1e4, 1e-3, 0
    arrays, cap = Arrays(), 4.0
    graph = shown(arrays, x, [SoftCap(0, "x", cap)], "x", {"x": width, "_dim": 2})
    for found in both(graph, arrays, ROWS, [2, 3]):
        assert np.abs(found - cap * np.tanh(x / cap)).max() < 2e-6
        assert found[0, :4].tolist() == [-cap, cap, -cap, cap] and found[0, 5] == 0
    x[1, 3] = np.nan
    arrays = Arrays()
    graph = shown(arrays, x, [SoftCap(0, "x", cap)], "x", {"x": width, "_dim": 2})
    for found in both(graph, arrays, ROWS):
        # What shows the buffer multiplies it by a matrix.
        assert np.isnan(found).all(axis=1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("width", [16, 40])
def test_factors_of_a_stream_sums_and_plain_gates(width):
    rng, arrays = np.random.default_rng(width), Arrays()
    x = rng.standard_normal((ROWS, width))
    factor, f = stored(arrays, rng.standard_normal(1), "bf16")
    operations = [
        Scale(0, "x", 2.0, "y"),
        ArrayScale(0, "x", factor),
        ScaleAdd(0, "y", -0.7, "x"),
        Gate(0, "x", "y", 3, width - 3, function=None),
    ]
    oracle, y = both(shown(arrays, x, operations, "x", {"x": width, "y": width, "_dim": 2}), arrays, ROWS, [2, 3])
    x = x.astype(np.float32)
    wanted = x * f - np.float32(1.4) * x
    wanted[:, : width - 3] *= 2 * x[:, 3:]
    for found in (oracle, y):
        assert np.abs(found - wanted).max() < 1e-5


@pytest.mark.parametrize("width", [16, 40])
def test_a_mean_of_parts_side_by_side(width):
    x, arrays = np.random.default_rng(width).standard_normal((ROWS, 4 * width)), Arrays()
    graph = shown(arrays, x, [RowMean(0, "x", 4, "y")], "y", {"x": 4 * width, "y": width, "_dim": 2})
    for found in both(graph, arrays, ROWS, [2, 3]):
        assert np.abs(found - x.reshape(ROWS, 4, width).mean(1)).max() < 1e-6


@pytest.mark.parametrize("width", [16, 40])
def test_channels_are_scaled_and_shifted(width):
    rng, arrays = np.random.default_rng(width), Arrays()
    x = rng.standard_normal((ROWS, width))
    (scale, a), (shift, b) = (stored(arrays, rng.standard_normal(width), dtype) for dtype in ("f32", "bf16"))
    graph = shown(arrays, x, [ScaleShift(0, "x", scale, shift)], "x", {"x": width, "_dim": 2})
    for found in both(graph, arrays, ROWS, [2, 3]):
        assert np.abs(found - (x * a + b)).max() < 1e-5


def test_shares_are_multiplied_by_numbers_of_their_experts():
    rng, arrays, chosen = np.random.default_rng(0), Arrays(), 3
    shares, names = rng.uniform(size=(ROWS, chosen)), rng.permuted(np.tile(np.arange(7), (ROWS, 1)), axis=1)[:, :chosen]
    scales, s = stored(arrays, rng.standard_normal(7), "f16")
    x = np.concatenate([shares, names], axis=1)
    graph = shown(arrays, x, [ShareScale(0, "x", chosen, scales)], "x", {"x": 2 * chosen, "_dim": 2})
    for found in both(graph, arrays, ROWS, [2, 3]):
        assert np.abs(found - np.concatenate([shares * s[names], names], axis=1)).max() < 1e-6


@pytest.mark.parametrize("kv", ["f16", "int8"])
@pytest.mark.parametrize(("dim", "pairs", "factor"), [(32, 16, 1.19), (40, 12, 1.0), (64, 3, 0.7), (32, 0, 1.0)])
def test_attention_behind_partial_scaled_and_no_rotation(dim, pairs, factor, kv):
    rng, arrays = np.random.default_rng(dim), Arrays()
    heads, kv_heads, positions = 4, 2, 70
    q, k = heads * dim, kv_heads * dim
    x = rng.standard_normal((positions, q + 2 * k))
    frequencies = tuple(100.0 ** (-i / max(pairs, 1)) for i in range(pairs))
    operations = []
    if pairs:
        operations = [RopeRotate(1, "x", o, n, dim, frequencies, factor) for o, n in ((0, heads), (q, kv_heads))]
    operations += [
        CacheWrite(1, "x", q, q + k, kv_heads, dim, cache=1),
        Attention(1, "x", 0, "a", heads, kv_heads, dim, 0.2, 30, cache=1),
    ]
    graph = shown(arrays, x, operations, "a", {"a": q, "_dim": dim})
    oracle, y = both(graph, arrays, positions, [33, 1, 36], kv=kv)
    assert np.abs(y - oracle).max() < (1e-3 if kv == "f16" else 0.1)
    turned = (x.reshape(positions, -1, dim)[:, :, :pairs] + 1j * x.reshape(positions, -1, dim)[:, :, pairs : 2 * pairs]) * (
        factor * np.exp(1j * np.arange(positions)[:, None, None] * np.array(frequencies))
    )
    by_hand = x.reshape(positions, -1, dim).copy()
    by_hand[:, : heads + kv_heads, :pairs] = turned.real[:, : heads + kv_heads]
    by_hand[:, : heads + kv_heads, pairs : 2 * pairs] = turned.imag[:, : heads + kv_heads]
    last = positions - 1
    for head in range(heads):
        keys, values = (by_hand[last - 29 :, heads + i + head // 2] for i in (0, kv_heads))
        weights = np.exp(keys @ by_hand[last, head] * 0.2)
        wanted = weights / weights.sum() @ values
        assert np.abs(oracle[last, head * dim : (head + 1) * dim] - wanted).max() < (2e-3 if kv == "f16" else 0.05)
