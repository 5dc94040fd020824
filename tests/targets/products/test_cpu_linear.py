"""The parts of a linear layer on the cpu target against the reference: each alone, all together, and what they are made of."""

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest

from edgeq.format.codec import Codec, pack_floats
from edgeq.format.quantization import quantize_tokens
from edgeq.format.records import Activation, LinearSpec, LowRank, SplitRow, Transform, Weight
from edgeq.targets import load
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import address
from edgeq.targets.cpu.kernels.args import A8
from edgeq.targets.cpu.kernels.rows import quantize
from edgeq.targets.cpu.lowering.layout import Layout, QuantizedActivation
from edgeq.targets.graph import Activate, CacheSpec, Embed, Graph, Linear, RmsNorm
from edgeq.targets.reference.linear import transformed
from edgeq.targets.target import Options
from tests.targets.cases import HERE, ISAS, Arrays, case, matrix, recording, rows_of, run, weight

I4, I8, ROW4, ROW8 = Codec("int", 4, 32), Codec("int", 8, 16, False), Codec("int", 4, 0), Codec("int", 8, 0)
NARROW, WIDE = Activation(4, 0, False), Activation(4, 8, False)
PALEY_12 = np.array(
    [[1] * 12] + [[-1] + [1 if i == j or (i - j) % 11 in (1, 3, 4, 5, 9) else -1 for j in range(11)] for i in range(11)],
    np.float32,
)


def layer(arrays, rng, rows, blocks, scale=False, order=False, low_rank=None, bias=False, **parts):
    """A layer with weight blocks of (codec, columns) and the parts asked for; `low_rank`: codec and rank."""
    columns = sum(size for _, size in blocks)
    if scale:
        parts["input_scale"] = arrays.add(2.0 ** rng.integers(-2, 3, columns).astype(np.float32), "f32")
    if order:
        parts["input_order"] = arrays.add(rng.permutation(columns).astype(np.int32), "i32")
    if low_rank:
        codec, rank = low_rank
        b, a = (weight(arrays, rng, codec, *shape) for shape in ((rows, rank), (rank, columns)))
        parts["low_rank"] = LowRank(b, a)
    if bias:
        parts["bias"] = arrays.add(rng.standard_normal(rows).astype(np.float32), "f32")
    weights = tuple(weight(arrays, rng, codec, rows, size) for codec, size in blocks)
    return LinearSpec("layer", weights, **parts)


def graph_of(arrays, x, *layers):
    """Row r of the result is each layer's result for x[token of row r], one behind the other."""
    operations, at = [Embed(-1, arrays.add(x, "f32"), "x")], 0
    for each in layers:
        operations.append(Linear(0, "x", each, "y", offset=at))
        at += each.rows
    return Graph({"x": x.shape[1], "y": at}, tuple(operations), "y", cache=(CacheSpec(1, 2, 2),))


def whole_numbers(rng, rows, columns):
    """Multiples of 1/8 from -7/8 to 1, with both ends in every 16 channels: 4 bits with a zero point hold them exactly."""
    x = rng.integers(-7, 9, (rows, columns)).astype(np.float32)
    x[:, ::16], x[:, 1::16] = 8, -7
    return x / 8


def size_of(arrays, x, *layers):
    """For each result, how large it could be: what rounding errors are measured by."""
    largest = 8 * np.abs(x).max() + 1
    total = [sum(np.abs(matrix(arrays, w)).sum(1) for w in each.weights) for each in layers]
    for i, each in enumerate(layers):
        if each.low_rank:
            b, a = (np.abs(matrix(arrays, w)).astype(np.float64) for w in (each.low_rank.b, each.low_rank.a))
            total[i] = total[i] + (b @ a).sum(1)
    return largest * np.concatenate(total) + 1


def agree(arrays, x, *layers, mode="a8", isa=None, rows=None, tolerance=1e-6):
    rows, graph = len(x) if rows is None else rows, graph_of(arrays, x, *layers)
    oracle = run("reference", graph, arrays, rows, Options(mode))
    many = run("cpu", graph, arrays, rows, Options(mode, 2, isa))
    assert np.max(np.abs(many - oracle) / size_of(arrays, x, *layers)) < tolerance, mode
    for threads in (1, 2):
        one = run("cpu", graph, arrays, 1, Options(mode, threads, isa))
        assert np.array_equal(one[0], many[0]), "a row alone must give the same bits as among others"
    return many


PARTS = {
    "input_scale": {"scale": True},
    "input_order": {"order": True},
    "low_rank": {"low_rank": (Codec("f16"), 16), "bias": True},
    "thin": {"low_rank": (Codec("bf16"), 3)},
    "thin f32": {"low_rank": (Codec("f32"), 5), "scale": True, "order": True},
    "token": {"activation": Activation(4, 0, False)},
    "token 8": {"activation": Activation(8, 0, False), "scale": True},
    "token symmetric": {"activation": Activation(5, 0, True)},
    "transform": {"transform": Transform(64)},
    "transform and all": {
        "transform": Transform(16), "scale": True, "order": True, "bias": True, "activation": NARROW,
        "low_rank": (Codec("f16"), 4),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "isa"),
    [
        case(parts, isa, common=isa == HERE[0] and name != "thin f32", id=f"{name}-{isa}")
        for name, parts in PARTS.items()
        for isa in HERE
    ],
)
def test_every_part_equals_the_reference(parts, isa):
    for codec, columns in ((I4, 192), (I8, 64), (ROW4, 320), (Codec("f16"), 64)):
        rng, arrays = np.random.default_rng(columns), Arrays()
        each = layer(arrays, rng, 37, [(codec, columns)], **parts)
        x = whole_numbers(rng, 18, columns)
        # Blocks of 4 and 16 bits, and those that are scaled, hold these numbers only nearly.
        for mode, tolerance in (("a16", 3e-5), ("a8", 2e-6)):
            exact = mode == "a16" or each.activation or codec.kind != "int"
            agree(arrays, x, each, mode=mode, isa=isa, tolerance=tolerance if exact else 2e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("low, high", [(112, 16), (56, 8), (160, 33), (3, 300), (896, 128)])
def test_two_blocks_are_added_with_a_scale_of_their_own_each(low, high, isa):
    rng, arrays = np.random.default_rng(low), Arrays()
    x = rng.standard_normal((18, low + high)).astype(np.float32)
    x[:, low:] *= 20
    layers = [
        layer(arrays, rng, 33, [(ROW4, low), (ROW8, high)], activation=WIDE, order=True, bias=True, scale=True),
        layer(arrays, rng, 20, [(ROW4, low), (Codec("f16"), high)], activation=replace(WIDE, symmetric=True)),
    ]
    for mode, tolerance in (("a16", 3e-5), ("a8", 1e-6), ("a4", 1e-6)):
        agree(arrays, x, *layers, mode=mode, isa=isa, tolerance=tolerance)


def test_all_parts_together_equal_the_formula():
    """Not against the reference but written out, with numbers that 4 and 8 bits hold exactly."""
    rng, arrays = np.random.default_rng(1), Arrays()
    parts = {"low_rank": (Codec("f32"), 3), "scale": True, "order": True, "bias": True, "activation": WIDE}
    each = layer(arrays, rng, 21, [(ROW4, 48), (ROW8, 16)], transform=Transform(16), **parts)
    x = rng.integers(-3, 4, (7, 64)).astype(np.float64)
    h = np.array([[1]])
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    order, scale = arrays.array(each.input_order), arrays.array(each.input_scale).astype(np.float64)
    prepared = (x[:, order].reshape(7, 4, 16) @ h / 4).reshape(7, 64) * scale
    low, high = prepared[:, :48], prepared[:, 48:]
    a, b = (matrix(arrays, w).astype(np.float64) for w in (each.low_rank.a, each.low_rank.b))
    for mode in ("a16", "a4"):
        seen = [low, high] if mode == "a16" else [quantize_tokens(low, 4, False), quantize_tokens(high, 8, False)]
        y = sum(v @ matrix(arrays, w).T.astype(np.float64) for v, w in zip(seen, each.weights, strict=True))
        y += x @ a.T @ b.T + arrays.array(each.bias)
        graph = graph_of(arrays, x.astype(np.float32), each)
        for target in ("reference", "cpu"):
            result = run(target, graph, arrays, 7, Options(mode))
            limit = (3e-5 if mode == "a16" else 1e-6) * size_of(arrays, x, each)
            assert (np.abs(result - y) < limit).all(), (mode, target)


@pytest.mark.parametrize("isa", ISAS)
def test_token_activations_of_every_width_and_of_extreme_rows(isa):
    rng, arrays = np.random.default_rng(2), Arrays()
    x = rng.standard_normal((9, 208)).astype(np.float32)
    x[0] = 0
    x[1, 5] = 1e6
    x[2] = -np.abs(x[2])
    x[3] = np.abs(x[3])
    x[4], x[4, 207] = 0, -3
    x[5] = 1e-33
    x[6] *= 1e25
    for bits in range(2, 9):
        for symmetric in (True, False):
            each = layer(arrays, rng, 19, [(ROW4, 208)], activation=Activation(bits, 0, symmetric))
            graph = graph_of(arrays, x, each)
            oracle = run("reference", graph, arrays, 9, Options("a4"))
            y = run("cpu", graph, arrays, 9, Options("a4", 2, isa))
            size = np.abs(x).max(1, keepdims=True) * np.abs(matrix(arrays, each.weights[0])).sum(1) + 1e-30
            assert np.max(np.abs(y - oracle) / size) < 2e-6, (bits, symmetric)
            assert not y[0].any() and not y[5].any()


def test_asymmetric_integers_stay_in_their_range_and_hold_zero_exactly():
    x = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)
    x[:, 7] = 0
    for bits in (2, 4, 8):
        seen = quantize_tokens(x, bits, False)
        assert not seen[:, 7].any()
        step = (x.max(1) - x.min(1)) / ((1 << bits) - 1)
        assert (np.abs(seen - x) <= 0.5001 * step[:, None] + step[:, None] * 0.5).all()
        assert all(len(np.unique(row)) <= 1 << bits for row in seen)


@pytest.mark.parametrize("factory, literals", [(quantize.quantize, (4,)), (quantize.quantize_tokens, (4, 1))])
@pytest.mark.parametrize("columns", [5, 16, 40, 200])
def test_channels_up_to_a_whole_chunk_are_zero_whatever_lay_there(factory, literals, columns):
    """Tiles of 4 tokens and of 1 put them in other places: what a longer run left must not be multiplied."""
    count, tiles, row_bytes = 9, ((0, 4), (4, 4), (8, 1)), -(-columns // 32) * 32
    x = np.zeros((count, 256), np.float32)
    x[:, :columns] = np.random.default_rng(columns).standard_normal((count, columns))
    data = np.full(count * row_bytes + 64, 85, np.int8)
    numbers, rows = np.zeros((2, count * 16), np.float32), np.array([count], np.int64)
    places = (data.ctypes.data, numbers[0].ctypes.data, numbers[1].ctypes.data)
    form = QuantizedActivation(Layout(A8, columns, 128, 127), *places)
    args = quantize.QuantizeArgs(rows=rows.ctypes.data, x=x.ctypes.data, x_stride=x.strides[0], quantized=form.args())
    record = np.array(args.record(), np.int64)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address(factory, *literals))(record.ctypes.data, 0, 1, 0)
    for first, tokens in tiles:
        tile = data[first * row_bytes : (first + tokens) * row_bytes].reshape(-1, tokens, 4)
        channels = tile.transpose(1, 0, 2).reshape(tokens, -1)
        assert channels[:, :columns].any(1).all() and not channels[:, columns:].any()
    assert (data[count * row_bytes :] == 85).all()


@pytest.mark.parametrize("isa", ISAS)
def test_blocks_of_mode_a4_are_seven_steps_to_either_side(isa):
    rng = np.random.default_rng(4)
    for codec, columns in ((I4, 96), (I8, 48), (ROW4, 260)):
        arrays = Arrays()
        each = layer(arrays, rng, 18, [(codec, columns)])
        x = rng.integers(-7, 8, (18, columns)).astype(np.float32)
        x[:, ::16] = 7
        x[3] = 0
        y = agree(arrays, x / 8, each, mode="a4", isa=isa)
        exact = x.astype(np.float64) / 8 @ matrix(arrays, each.weights[0]).T.astype(np.float64)
        assert np.max(np.abs(y - exact) / size_of(arrays, x, each)) < 1e-6 and not y[3].any()
        half = agree(arrays, (x + 0.4 * (np.abs(x) < 7)).astype(np.float32), each, mode="a4", isa=isa, tolerance=1e-5)
        assert np.abs(half - 8 * y).max() > 0 or codec is not ROW4


def dense(transform, base):
    """The transform as a matrix float64 [size, size], from its definition."""
    h = np.ones((1, 1))
    while len(h) < transform.size // transform.base_size:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.ones((1, 1)) if base is None else base, h) / math.sqrt(transform.size)


ORDERS = [
    # size, K, stride, runs
    (1, 1, 1, 16), (4, 1, 1, 5), (16, 1, 1, 3), (32, 1, 1, 1), (64, 1, 1, 2), (128, 1, 1, 1), (8192, 1, 1, 1),
    (12, 12, 1, 4), (24, 12, 1, 2), (768, 12, 1, 1), (11008, 172, 1, 1), (14336, 28, 1, 1), (18944, 37, 1, 1),
    (4864, 38, 1, 1), (32, 1, 64, 1), (2, 1, 16, 3), (8, 1, 80, 1), (4, 1, 20, 2), (12, 12, 32, 1), (40, 20, 8, 1),
    (24, 12, 16, 2), (5, 5, 48, 1),
]  # fmt: skip


@pytest.mark.parametrize("size, order, stride, runs", ORDERS)
def test_transform_of_every_order_equals_its_matrix(size, order, stride, runs):
    rng, arrays = np.random.default_rng(size), Arrays()
    columns = size * stride * runs
    base = None
    if order > 1:
        base = (np.linalg.qr(rng.standard_normal((order, order)))[0] * math.sqrt(order)).astype(np.float32)
    t = Transform(size, stride, None if base is None else arrays.add(base, "f32"))
    x = rng.standard_normal((6, columns)).astype(np.float32)
    wanted = transformed(x, t, base)
    if size <= 768:
        runs_of = x.reshape(6, runs, size, stride).astype(np.float64)
        assert np.abs(np.einsum("ij,rkjs->rkis", dense(t, base), runs_of).reshape(6, -1) - wanted).max() < 1e-5
    assert np.abs(np.square(wanted).sum(1) / np.square(x).sum(1) - 1).max() < 1e-4
    # A matrix that shows some of the channels unchanged.
    shown = rng.choice(columns, min(columns, 48), replace=False)
    picks = np.zeros((len(shown), columns), np.float32)
    picks[np.arange(len(shown)), shown] = 1
    w = Weight(Codec("f32"), *picks.shape, {"q": arrays.add(pack_floats(picks, "f32"), "f32")})
    graph = graph_of(arrays, x, LinearSpec("layer", (w,), transform=t))
    results = [run("cpu", graph, arrays, 6, Options("a16", 2, isa)) for isa in HERE]
    for y in results:
        assert np.abs(y - wanted[:, shown]).max() < 2e-5
    for threads in (1, 2, 3):
        assert np.array_equal(run("cpu", graph, arrays, 1, Options("a16", threads, HERE[0]))[0], results[0][0])


@pytest.mark.parametrize("isa", ISAS[:2])
@pytest.mark.parametrize(
    "size, order, stride, scales, function, gated",
    [
        (192, 12, 1, None, None, False),
        (192, 12, 16, (0.03, 0.05), "silu", True),
        (320, 20, 4, None, "quick_gelu", False),
        (512, 1, 1, (0.04,), "silu", True),
    ],
)
def test_one_operation_activates_transforms_by_signs_and_rounds(size, order, stride, scales, function, gated, isa):
    """`scales`: constant ones, else one for each row."""
    rng, arrays = np.random.default_rng(size), Arrays()
    columns = size * stride
    base = arrays.add(np.sign(rng.standard_normal((order, order))).astype(np.float32), "f32") if order > 1 else None
    constant = None if scales is None else arrays.add(np.array(scales, np.float32), "f32")
    split = SplitRow(3, arrays.add(rng.standard_normal(37).astype(np.float16), "f16"))
    parts = {"transform": Transform(size, stride, base), "activation": Activation(8, scales=constant), "split_row": split}
    each = layer(arrays, rng, 37, [(ROW8, columns)], **parts)
    x = rng.standard_normal((19, columns * (1 + gated))).astype(np.float32)
    operations = [Embed(-1, arrays.add(x, "f32"), "inner" if function else "x"), Linear(0, "x", each, "y")]
    if function:
        operations.insert(1, Activate(0, "inner", columns, "x", function, gated))
    graph = Graph({"inner": x.shape[1], "x": columns, "y": 37}, tuple(operations), "y", cache=(CacheSpec(1, 2, 2),))
    oracle = run("reference", graph, arrays, 19, Options("a8"))
    program = load("cpu").compile(graph, arrays, Options("a8", 2, isa, 19, 19))
    with recording(program) as times:
        many = np.array(program.run(rows_of(program, 19)))
    made = [step.kernel for step in times[0].steps if step.kernel.startswith(("hadamard", "mix", "quantize", "transform"))]
    assert made == ["transform" if scales else "transform_tokens"]
    # A number halfway between two integers may become either.
    assert np.max(np.abs(many - oracle) / size_of(arrays, x, each)) < 2e-5
    for threads in (1, 2):
        assert np.array_equal(run("cpu", graph, arrays, 1, Options("a8", threads, isa))[0], many[0])


def test_online_transform_undoes_the_one_in_the_weights():
    """W^ = rows of W transformed as x is, so W^ x^ = W x: also where the base is not symmetric."""
    rng, arrays = np.random.default_rng(5), Arrays()
    base = arrays.add(PALEY_12, "f32")
    assert np.array_equal(PALEY_12 @ PALEY_12.T, 12 * np.eye(12)) and not np.array_equal(PALEY_12, PALEY_12.T)
    t = Transform(96, 1, base)
    w, x = rng.standard_normal((30, 192)).astype(np.float32), rng.standard_normal((4, 192)).astype(np.float32)
    turned = transformed(w, t, PALEY_12)
    each = LinearSpec(
        "layer", (Weight(Codec("f32"), 30, 192, {"q": arrays.add(pack_floats(turned, "f32"), "f32")}),), transform=t
    )
    for target in ("reference", "cpu"):
        y = run(target, graph_of(arrays, x, each), arrays, 4, Options("a16"))
        assert np.abs(y - x @ w.T).max() < 1e-4


def test_layers_of_the_same_parts_share_what_is_made_of_their_input():
    rng, arrays = np.random.default_rng(6), Arrays()
    x = whole_numbers(rng, 5, 64)
    parts = {"transform": Transform(64), "activation": NARROW}
    same = [layer(arrays, rng, 16, [(ROW4, 64)], **parts) for _ in range(3)]
    other = layer(arrays, rng, 16, [(ROW4, 64)], **parts, scale=True)
    program = load("cpu").compile(graph_of(arrays, x, *same, other), arrays, Options("a8", 2, None, 5, 5))
    with recording(program) as times:
        program.run(rows_of(program, 5))
    made = ["product" if kernel.endswith("_matmul") else kernel for kernel in (step.kernel for step in times[0].steps)]
    assert made == ["embed_plain", "transform_tokens", *["product"] * 3, "transform_tokens", "product"]
    ordered = [layer(arrays, rng, 16, [(ROW4, 64)], **parts, order=True) for _ in range(2)]
    agree(arrays, x, *same, other, *ordered, mode="a8")


def test_scaled_input_is_written_by_its_maker():
    rng, arrays = np.random.default_rng(7), Arrays()
    x = rng.standard_normal((5, 96)).astype(np.float32)
    gain = arrays.add(rng.uniform(0.5, 2, 96).astype(np.float32), "f32")
    each = layer(arrays, rng, 40, [(I4, 96)], scale=True)
    operations = (Embed(-1, arrays.add(x, "f32"), "x"), RmsNorm(0, "x", gain, 1e-5, "n"), Linear(0, "n", each, "y"))
    graph = Graph({"x": 96, "n": 96, "y": 40}, operations, "y", (CacheSpec(1, 2, 2),))
    program = load("cpu").compile(graph, arrays, Options("a16", 2, None, 5, 5))
    with recording(program) as times:
        y = program.run(rows_of(program, 5))
    isa = next(isa for isa in all_isas() if isa.name == program.facts().isa)
    product = "panel_matmul" if isa.panels else "matrix_matmul" if isa.matrix_unit else "integer_matmul"
    assert [step.kernel for step in times[0].steps] == ["embed_plain", "norm", product]
    oracle = run("reference", graph, arrays, 5, Options("a16"))
    assert np.max(np.abs(y - oracle) / size_of(arrays, x, each)) < 3e-5


def test_another_mode_runs_over_the_same_buffers_and_leaves_the_first_as_it_was():
    rng, arrays = np.random.default_rng(8), Arrays()
    x = rng.standard_normal((9, 128)).astype(np.float32)
    layers = [
        layer(arrays, rng, 40, [(I4, 128)], scale=True),
        layer(arrays, rng, 24, [(ROW4, 112), (ROW8, 16)], activation=WIDE, order=True),
    ]
    graph = graph_of(arrays, x, *layers)
    for target in ("cpu", "reference"):
        program = load(target).compile(graph, arrays, Options("a16", max_rows=9, max_logits=9))
        alone = {mode: run(target, graph, arrays, 9, Options(mode)) for mode in ("a16", "a8", "a4")}
        for mode in ("a16", "a4", "a8", "a4", None, "a8"):
            assert np.array_equal(program.run(rows_of(program, 9), mode), alone[mode or "a16"]), (target, mode)
        assert not np.array_equal(alone["a8"][:, :40], alone["a4"][:, :40])
        assert np.array_equal(alone["a8"][:, 40:], alone["a4"][:, 40:]), "a layer's own activation holds in both modes"


def test_modes_share_their_memory():
    rng, arrays = np.random.default_rng(9), Arrays()
    x = rng.standard_normal((4, 256)).astype(np.float32)
    graph = graph_of(arrays, x, layer(arrays, rng, 512, [(I4, 256)], transform=Transform(256), scale=True))
    program = load("cpu").compile(graph, arrays, Options("a16", 2, None, 64, 64))
    before = program._memory.allocated
    program.run(rows_of(program, 4), "a8")
    of_pairs = 2 * 32 * 8 * 128
    assert program._memory.allocated - before <= 64 * 256 + 3 * 64 * 4 * 8 + of_pairs, "only the 8-bit form of the input is new"
