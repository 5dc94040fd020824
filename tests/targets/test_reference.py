"""The oracle against formulas written out by hand, on weights of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import UnsupportedError
from edgeq.format.codec import Codec, dequantize, pack_floats, pack_groups, pack_integers
from edgeq.format.container import ModelFile
from edgeq.format.manifest import array_shapes, fused_shapes
from edgeq.format.metadata import Metadata
from edgeq.format.quantization import activation_block, activation_limit, quantize_blocks
from edgeq.format.records import ArrayRef, LinearSpec, Transform, Weight
from edgeq.format.writer import Writer
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope
from edgeq.targets import pick
from edgeq.targets.graph import Activate, Attention, CacheSpec, CacheWrite, Embed, Graph, Linear, Operation, RopeRotate, Select
from edgeq.targets.reference import ReferenceTarget, attention, layers, linear, matrices
from edgeq.targets.reference.program import ReferenceProgram
from edgeq.targets.rows import PAGE, Page, Rows
from edgeq.targets.target import Options

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=40,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10000.0),
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
CODECS = (
    Codec("f32"),
    Codec("f16"),
    Codec("bf16"),
    Codec("int", 4, 32),
    Codec("int", 3, 16, symmetric=False),
    Codec("int", 8, 0),
)


def stored_linear(writer: Writer, name: str, codec: Codec, rows: int, columns: int, rng: np.random.Generator) -> LinearSpec:
    """A random matrix with a bias, written in `codec`."""
    if codec.kind != "int":
        q = pack_floats(rng.normal(size=(rows, columns)).astype(np.float32), codec.kind)
        # Writer.array converts numbers: f16 must not arrive as its bits.
        stored = writer.array(q.view(np.float16) if codec.kind == "f16" else q, codec.kind)
        weight = Weight(codec, rows, columns, {"q": stored})
    else:
        groups = codec.groups(columns)
        values = rng.integers(0, 1 << codec.bits, (rows, columns)).astype(np.uint8)
        parts = {"scale": writer.array(pack_groups(rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float16)), "f16")}
        if not codec.symmetric:
            zeros = rng.integers(0, 1 << codec.bits, (rows, groups)).astype(np.uint8)
            parts["zero"] = writer.array(pack_groups(zeros), "u8")
        parts = {"q": writer.array(pack_integers(values, codec.bits), "u8"), **parts}
        weight = Weight(codec, rows, columns, parts)
    return LinearSpec(name, (weight,), writer.array(rng.normal(size=rows).astype(np.float32), "f32"))


def build(path: Path, codec: Codec) -> ModelFile:
    rng = np.random.default_rng(5)
    writer = Writer(path)
    linears, arrays = dict[str, LinearSpec](), dict[str, ArrayRef]()
    for _, parts in fused_shapes(CONFIG, 0):
        for name, shape in parts.items():
            linears[name] = stored_linear(writer, name, codec, *shape, rng)
    linears["head"] = stored_linear(writer, "head", codec, CONFIG.vocab_size, CONFIG.hidden_size, rng)
    for name, wanted in array_shapes(CONFIG).items():
        arrays[name] = writer.array(rng.normal(size=wanted).astype(np.float32), "f32")
    return writer.finish(Metadata(CONFIG, {}, {}, "a16", linears, arrays))


def rows_of(count: int, pages: list[Page] | None = None) -> Rows:
    index = np.arange(count, dtype=np.int32)
    return Rows(index, index[None], index, np.zeros(count, np.int32), [pages or []], index)


def program_of(
    file: ModelFile,
    operations: tuple[Operation, ...],
    buffers: dict[str, int],
    cache: tuple[CacheSpec, ...] = (CacheSpec(CONFIG.num_key_value_heads, CONFIG.head_dim, CONFIG.head_dim),),
    mode: str = "a16",
) -> ReferenceProgram:
    graph = Graph(buffers, operations, "out", cache)
    return ReferenceTarget().compile(graph, file, Options(mode, max_rows=8, max_logits=8))  # type: ignore[arg-type]


def matrix(file: ModelFile, linear: LinearSpec) -> np.ndarray:
    w = linear.weights[0]
    return dequantize(w.codec, w.rows, w.columns, {name: file.array(ref) for name, ref in w.arrays.items()})


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@pytest.mark.parametrize("name", ("layers.0.down", "layers.0.k", "head"))
def test_linear_is_the_dequantized_matrix_times_x_plus_bias(codec: Codec, name: str, tmp_path: Path) -> None:
    file = build(tmp_path / "a.edgeq", codec)
    spec = file.metadata.linears[name]
    program = program_of(file, (), {"out": spec.rows + 3})
    x = np.random.default_rng(1).normal(size=(3, spec.columns)).astype(np.float32)
    state = {"x": x, "out": np.ones((3, spec.rows + 3), np.float32)}
    linear.linear(program.context, Linear(0, "x", spec, "out", offset=2, add=True), rows_of(3), state)
    wanted = x.astype(np.float64) @ matrix(file, spec).T.astype(np.float64) + program.context.array(spec.bias) + 1
    assert np.allclose(state["out"][:, 2:-1], wanted, rtol=1e-5, atol=1e-4)
    assert np.array_equal(state["out"][:, [0, 1, -1]], np.ones((3, 3)))


def test_matrices_beyond_the_budget_are_streamed_with_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = build(tmp_path / "a.edgeq", Codec("int", 4, 32))
    spec = file.metadata.linears["layers.0.gate"]
    x = np.random.default_rng(1).normal(size=(3, spec.columns)).astype(np.float32)
    monkeypatch.setattr(matrices, "BLOCK_ELEMENTS", 48 * spec.columns)  # 160 rows in blocks of 48
    results = []
    for budget in (1 << 30, 0):
        monkeypatch.setattr(matrices, "KEEP_BYTES", budget)
        program = program_of(file, (), {"out": spec.rows})
        for _ in range(2):
            state = {"x": x}
            linear.linear(program.context, Linear(0, "x", spec, "out"), rows_of(3), state)
            results.append(state["out"])
        assert bool(program.context.matrices.kept) == (budget > 0)
    assert all(np.array_equal(r, results[0]) for r in results)


@pytest.mark.parametrize("mode", ["a16", "a8"])
def test_a_run_without_logits_ends_where_they_would_begin(mode: str, tmp_path: Path) -> None:
    file = build(tmp_path / "a.edgeq", Codec("int", 4, 32))
    spec = replace(file.metadata.linears["head"], transform=Transform(16))
    table = Embed(0, spec, "x")
    program = program_of(file, (table, Select(0, ("x",)), Linear(0, "x", spec, "out")), {"x": 64, "out": 40}, mode=mode)
    rows = rows_of(3)
    assert program.run(rows).shape == (3, 40)
    assert program.run(replace(rows, wanted=rows.wanted[:0])).shape == (0, 40)


def test_mode_a8_quantizes_the_input_of_integer_layers_only(tmp_path: Path) -> None:
    for codec in (Codec("f16"), Codec("int", 4, 32)):
        file = build(tmp_path / "a.edgeq", codec)
        spec = file.metadata.linears["layers.0.down"]
        x = np.random.default_rng(1).normal(size=(2, spec.columns)).astype(np.float32)
        state = {"x": x}
        linear.linear(
            program_of(file, (), {"out": spec.rows}, mode="a8").context, Linear(0, "x", spec, "out"), rows_of(2), state
        )
        seen = quantize_blocks(x, 32, activation_limit(codec, "a8")) if codec.kind == "int" else x
        wanted = seen @ matrix(file, spec).T + file.array(spec.bias)
        assert np.allclose(state["out"], wanted, atol=1e-3)
        assert np.array_equal(seen, x) == (codec.kind != "int")


@pytest.mark.parametrize(("group_size", "size"), ((0, 128), (16, 16), (32, 32), (128, 128)))
def test_activations_are_int8_per_row_and_block(group_size: int, size: int) -> None:
    x = np.random.default_rng(2).normal(size=(3, 320)).astype(np.float32)
    x[1, :size] = 0
    y = quantize_blocks(x, activation_block(Codec("int", 8, group_size)), 127)
    assert y.shape == x.shape and not y[1, :size].any()
    for row in range(3):
        for start in range(0, 320, size):
            block, got = x[row, start : start + size], y[row, start : start + size]
            scale = np.abs(block).max() / np.float32(127)
            if scale:
                assert np.array_equal(got, np.rint(block / scale) * scale)
                assert np.abs(got - block).max() <= scale * 0.5001


def test_activations_too_small_for_their_scale_stay_in_range() -> None:
    tiny = np.float32(1e-45)  # the smallest number above zero: the scale of the block is rounded by half
    y = quantize_blocks(np.full((1, 16), tiny * 190, np.float32), 16, 127)
    assert np.isfinite(y).all() and y.max() <= tiny * 190


def test_the_embedding_of_a_tied_head_is_its_row(tmp_path: Path) -> None:
    file = build(tmp_path / "a.edgeq", Codec("int", 3, 16, symmetric=False))
    head = file.metadata.linears["head"]
    picked = np.array([39, 0, 17], np.int64)
    assert np.array_equal(program_of(file, (), {}).context.table_rows(head, picked), matrix(file, head)[picked])


def test_rotation_turns_each_pair_by_its_angle(tmp_path: Path) -> None:
    file = build(tmp_path / "a.edgeq", Codec("f32"))
    x = np.random.default_rng(1).normal(size=(4, 2 * 6 + 3)).astype(np.float32)
    frequencies = (1.0, 0.3, 0.01)
    state = {"x": x.copy()}
    rows = rows_of(4)
    rows.positions = np.array([[0, 1, 7, 100_003]], np.int32)
    attention.rope_rotate(program_of(file, (), {}).context, RopeRotate(0, "x", 3, 2, 6, frequencies), rows, state)
    assert np.array_equal(state["x"][:, :3], x[:, :3])
    before, after = (a[:, 3:].reshape(4, 2, 2, 3).astype(np.float64) for a in (x, state["x"]))
    turned = (before[:, :, 0] + 1j * before[:, :, 1]) * np.exp(1j * rows.positions[0][:, None, None] * np.array(frequencies))
    assert np.allclose(after[:, :, 0], turned.real, atol=1e-6) and np.allclose(after[:, :, 1], turned.imag, atol=1e-6)


def test_swiglu_is_exact_at_extreme_gates(tmp_path: Path) -> None:
    file = build(tmp_path / "a.edgeq", Codec("f32"))
    state = {"x": np.array([[-1e4, 0, 1e4, 1, 2, 3, 4, 5]], np.float32)}
    layers.activate(program_of(file, (), {}).context, Activate(0, "x", 4, "out"), rows_of(1), state)
    assert np.allclose(state["out"], [[0, 0, 4e4, 5 / (1 + np.exp(-1))]])


@pytest.mark.parametrize("window", (0, 1, 5, 70))
def test_attention_reads_the_window_across_pages(window: int, tmp_path: Path) -> None:
    file = build(tmp_path / "a.edgeq", Codec("f32"))
    program = program_of(file, (), {"out": 64})
    rng = np.random.default_rng(4)
    pages = [program.new_page() for _ in range(3)]
    slot = 2 * PAGE + 3
    x = rng.normal(size=(1, 64 + 32 + 32)).astype(np.float32)
    keys, values = (rng.normal(size=(slot + 1, 2, 16)).astype(np.float16) for _ in range(2))
    for t in range(slot):
        pages[t // PAGE].full.layers[0][0][:, t % PAGE] = keys[t]  # type: ignore[attr-defined]
        pages[t // PAGE].full.layers[0][1][:, t % PAGE] = values[t]  # type: ignore[attr-defined]
    keys[slot], values[slot] = x[0, 64:96].reshape(2, 16), x[0, 96:].reshape(2, 16)
    rows = rows_of(1, pages)
    rows.slots = np.array([slot], np.int32)
    state = {"x": x}
    attention.cache_write(program.context, CacheWrite(0, "x", 64, 96, 2, 16, cache=0), rows, state)
    attention.attention(program.context, Attention(0, "x", 0, "out", 4, 2, 16, 0.25, window, cache=0), rows, state)
    first = max(0, slot + 1 - window) if window else 0
    for head in range(4):
        k, v = keys[first:, head // 2].astype(np.float64), values[first:, head // 2].astype(np.float64)
        weights = np.exp(k @ x[0, head * 16 : head * 16 + 16] * 0.25)
        assert np.allclose(state["out"][0, head * 16 : head * 16 + 16], weights / weights.sum() @ v, atol=1e-5)


def test_the_cache_holds_the_largest_f16_instead_of_infinity(tmp_path: Path) -> None:
    program = program_of(build(tmp_path / "a.edgeq", Codec("f32")), (), {})
    page = program.new_page()
    state = {"x": np.array([[1e6] * 32 + [-1e6] * 32], np.float32)}
    attention.cache_write(program.context, CacheWrite(0, "x", 0, 32, 2, 16, cache=0), rows_of(1, [page]), state)
    keys, values = page.full.layers[0]  # type: ignore[attr-defined]
    assert (keys[:, 0] == 65504).all() and (values[:, 0] == -65504).all()


def test_values_may_be_narrower_than_keys(tmp_path: Path) -> None:
    cache = (CacheSpec(2, 16, 12),)
    program = program_of(build(tmp_path / "a.edgeq", Codec("f32")), (), {"out": 48}, cache)
    x = np.random.default_rng(5).normal(size=(3, 64 + 32 + 24)).astype(np.float16).astype(np.float32)
    rows, state = rows_of(3, [program.new_page()]), {"x": x}
    attention.cache_write(program.context, CacheWrite(0, "x", 64, 96, 2, 16, cache=0), rows, state)
    attention.attention(program.context, Attention(0, "x", 0, "out", 4, 2, 16, 0.25, 0, cache=0), rows, state)
    keys, values = x[:, 64:96].reshape(3, 2, 16), x[:, 96:].reshape(3, 2, 12)
    for head in range(4):
        weights = np.exp(keys[:, head // 2] @ x[2, head * 16 : head * 16 + 16] * 0.25)
        by_hand = weights / weights.sum() @ values[:, head // 2]
        assert np.allclose(state["out"][2, head * 12 : head * 12 + 12], by_hand, atol=1e-5)
    assert len(program.save_page(program.new_page())) == 4 * PAGE * 2 * (16 + 12)


def test_more_rows_than_compiled_for_are_refused(tmp_path: Path) -> None:
    program = program_of(build(tmp_path / "a.edgeq", Codec("f32")), (Select(0, ("x",)),), {})
    with pytest.raises(ValueError, match="9 rows"):
        program.run(rows_of(9))


def test_an_instruction_set_is_refused(tmp_path: Path) -> None:
    file = build(tmp_path / "a.edgeq", Codec("f32"))
    with pytest.raises(UnsupportedError, match="isa 'avx2'"):
        ReferenceTarget().compile(Graph({}, (), "out", (CacheSpec(2, 16, 16),)), file, Options("a16", isa="avx2"))
    assert pick("reference").target.name == "reference"
