"""GGUF files of the dense families beside the Llama line: settings that are keys, rows in other orders, norms elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from edgeq.converters.convert import carry_out
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.running.readback import stored_tensors
from edgeq.errors import CheckpointError, EdgeqError, UnsupportedError
from edgeq.runtime.model import Model
from tests.converters.importers.conversions import plan_of, silent
from tests.converters.importers.gguf_files import in_type, write_gguf
from tests.turns import by_turns

# The tokenizer is not what these tests are about.
pytestmark = pytest.mark.usefixtures("tiny_tokenizer")
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.375},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
}
"""As many whole pairs of a head of 64 turn."""
ALIKE_HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
"""llama.cpp has one size for keys and values of a delta net; whole blocks of most types move with a head of this one."""
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "olmo3": {},
    "exaone4": {},
    "glm4": {},
    "ernie4_5": {},
    "granite": {},
    "cohere": {},
    "cohere2": {"tie_word_embeddings": True},
    "stablelm": {},
    "stablelm_parallel": {},
    "starcoder2": {"sliding_window": 4096},
    "gpt2": {},
    "bigcode": {"n_inner": 384},
    "neox": {},
    "neox_sequential": {"hidden_act": "gelu", "attention_bias": True},
    "falcon_7b": {},
    "falcon_40b": {"bias": False},
    "bloom": {"seq_length": 512},
    "mpt": {"attn_config": {"clip_qkv": 0.5, "alibi_bias_max": 5}},
    "lfm2": {},
    "gemma4": {"rope_parameters": GEMMA4_ROPE, "hidden_size_per_layer_input": 32},
    "gemma4_keys": {"rope_parameters": GEMMA4_ROPE},
    "gemma4_moe": {"rope_parameters": GEMMA4_ROPE},
    "gpt_oss": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "granite_moe_shared": {},
    "granite_hybrid": {"time_step_limit": (0.0, math.inf)},
    "granite_hybrid_moe": {},
    "nemotron_h": {},
    "nemotron_h_biases": {},
    "nemotron_h_experts": {},
    "qwen3_next": {**ALIKE_HEADS, "norm_topk_prob": True},
    "qwen3_5": ALIKE_HEADS,
    "qwen3_5_moe": ALIKE_HEADS,
    "qwen3_next_mtp": {**ALIKE_HEADS, "norm_topk_prob": True},
    "qwen3_5_moe_mtp": ALIKE_HEADS,
}
"""Family of `tests/checkpoints/families.py` -> settings with which llama.cpp's keys can say it."""
TOKENS = [1, 5, 9, 2, 30, 2047, *range(100, 140)]
"""More than a window."""


def logits(plan: ConversionPlan, path: Path, target: str = "reference") -> np.ndarray[Any, Any]:
    file = carry_out(plan, path, silent).file
    with Model.load(file.path, target=target, threads=1) as model:
        return model.session().prefill(TOKENS)


@pytest.mark.parametrize("family", by_turns(FAMILIES, 0, 3))
def test_a_file_runs_as_the_checkpoint_that_it_was_made_of(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    folder = checkpoint(family, **FAMILIES[family])
    write_gguf(folder, tmp_path / "m.gguf")
    wanted, found = (plan_of(place, method="none") for place in (folder, tmp_path / "m.gguf"))
    assert found.method.config == wanted.method.config
    shapes = wanted.method.family.tensor_shapes()
    assert shapes == found.method.family.tensor_shapes()
    exact = True
    for name, shape in shapes.items():
        theirs, ours = (plan.checkpoint.rows(name, 0, shape[0]) for plan in (wanted, found))
        if "decay" in name:
            # A file has -exp of it, which is rounded.
            exact = False
            assert np.abs(ours - theirs).max() < 1e-6, name
        else:
            assert np.array_equal(ours, theirs), name
    expected = logits(wanted, tmp_path / "wanted.edgeq")
    largest = np.abs(expected).max()
    assert largest > 0.1
    assert np.abs(logits(found, tmp_path / "found.edgeq") - expected).max() <= (0 if exact else 1e-5 * largest)


@pytest.mark.parametrize("family", by_turns(FAMILIES, 1, 3))
def test_integers_are_kept_where_rows_move(checkpoint: Callable[..., Path], tmp_path: Path, family: str) -> None:
    folder, kind = checkpoint(family, **FAMILIES[family]), Type.Q4_1
    write_gguf(folder, tmp_path / "m.gguf", in_type(kind))
    plan = plan_of(tmp_path / "m.gguf")
    file = carry_out(plan, tmp_path / "m.edgeq", silent).file
    floats = ("router", "row_context", "shared_gate", "delta_rates", "ssd_dt", "draft.embedding", "draft.hidden")
    linears = [linear for name, linear in file.metadata.linears.items() if not name.endswith(floats)]
    assert {weight.codec.name for linear in linears for weight in linear.weights} == {"i4 g32 offset"}
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    source = plan_of(folder, method="none").checkpoint
    for name, shape in plan.method.family.tensor_shapes().items():
        values = source.rows(name, 0, shape[0])
        if "decay" in name:
            assert np.abs(read(name) - values).max() < 1e-6, name
            continue
        if values.ndim > 1 and "gate." not in name and "conv." not in name:
            # Blocks lie in rows: those of the checkpoint, rounded in its own order, are the same.
            values = gguf.dequantize(gguf.quantize(values, kind), kind)
        assert np.array_equal(read(name), values), name


REFUSED: list[tuple[str, dict[str, Any], type[EdgeqError], str]] = [
    ("olmo2", {"olmo2.attention.clamp_kqv": 8.0}, UnsupportedError, r"olmo2\.attention\.clamp_kqv is 8\.0; supported: 0\.0"),
    ("olmo3", {"olmo2.rope.scaling.yarn_ext_factor": 0.5}, UnsupportedError, "yarn_ext_factor is 0.5; supported: 1.0"),
    (
        "olmo3",
        {"olmo2.rope.scaling.yarn_log_multiplier": 0.1},
        UnsupportedError,
        "yarn_log_multiplier is 0.1; supported: files",
    ),
    (
        "olmo3",
        {"olmo2.attention.sliding_window_pattern": [True]},
        CheckpointError,
        "a positive integer or 3 times true or false",
    ),
    ("olmo3", {"olmo2.attention.sliding_window": [24, 24]}, CheckpointError, "sliding_window is array.*expected an integer"),
    (
        "exaone4",
        {"exaone4.attention.sliding_window_pattern": 0},
        CheckpointError,
        "sliding_window_pattern is 0; expected a posi",
    ),
    ("cohere2", {"cohere2.block_count": 1 << 30}, CheckpointError, r"block_count is 1073741824; expected at most"),
    ("glm4", {"glm4.rope.dimension_sections": [8, 8, 8, 0]}, UnsupportedError, "dimension_sections is array"),
    ("glm4", {"glm4.nextn_predict_layers": 1}, UnsupportedError, r"nextn_predict_layers is 1; supported: 0"),
    ("granite", {"granite.rope.scaling.finetuned": False}, UnsupportedError, "finetuned is False; supported: True"),
    ("granite", {"granite.deepstack_mapping": [1, 0]}, UnsupportedError, "deepstack_mapping is array.*files without it"),
    ("cohere2", {"cohere2.logit_scale": 0.0}, CheckpointError, "logit_scale is 0.0; expected a number from"),
    (
        "stablelm",
        {"stablelm.attention.layer_norm_epsilon": "1e-5"},
        CheckpointError,
        "layer_norm_epsilon is '1e-5'; expected a",
    ),
    ("starcoder2", {"starcoder2.attention.max_alibi_bias": 8.0}, UnsupportedError, "max_alibi_bias is 8.0; supported: files"),
    ("neox", {"gptneox.use_parallel_residual": 1}, CheckpointError, "use_parallel_residual is 1; expected true or false"),
    ("falcon_7b", {"falcon.tensor_data_layout": "meta"}, UnsupportedError, "data_layout is 'meta'; supported: 'jploski'"),
    ("bigcode", {"starcoder.attention.head_count_kv": 4}, UnsupportedError, "head_count_kv is 4; supported: 1"),
    ("gpt2", {"gpt2.attention.max_alibi_bias": 8.0}, UnsupportedError, "max_alibi_bias is 8.0; supported: files"),
    ("bloom", {"bloom.attention.max_alibi_bias": 4.0}, UnsupportedError, "max_alibi_bias is 4.0; supported: 8.0"),
    ("bloom", {"bloom.feed_forward_length": 96}, UnsupportedError, "feed_forward_length is 96; supported: 512"),
    ("mpt", {"mpt.attention.max_alibi_bias": 0.0}, CheckpointError, "max_alibi_bias is 0.0; expected a positive number"),
    ("mpt", {"mpt.feed_forward_length": 200}, CheckpointError, "is 200; expected a multiple of embedding_length, 128"),
    ("mpt", {"mpt.attention.clamp_kqv": [8.0, 8.0]}, CheckpointError, "clamp_kqv is .*expected a number"),
    ("mpt", {"mpt.attention.clamp_kqv": -2.0}, CheckpointError, "clip_qkv is -2.0; expected a positive number"),
    ("falcon_7b", {"falcon.attention.max_alibi_bias": 8.0}, UnsupportedError, "max_alibi_bias is 8.0; supported: files"),
    (
        "lfm2",
        {"lfm2.attention.head_count_kv": [0, 2, 1, 0]},
        CheckpointError,
        r"head_count_kv is \[0, 2, 1, 0\]; expected a number",
    ),
    (
        "lfm2",
        {"lfm2.attention.head_count_kv": [0, 0, 0, 0]},
        CheckpointError,
        "expected a number for each layer, 0 or the same",
    ),
    ("gemma4", {"gemma4.attention.head_count_kv": [2, 2, 2, 2, 2, 1]}, CheckpointError, "one number for layers with a window"),
    ("gemma4", {"gemma4.feed_forward_length": [256] * 3 + [512] * 3}, CheckpointError, "or twice as much in the layers that"),
    ("gemma4", {"gemma4.attention.sliding_window_pattern": [True] * 6}, CheckpointError, "and layers without one"),
    ("gemma4", {"gemma4.attention.value_length_swa": 16}, UnsupportedError, "value_length_swa is 16; supported: 32"),
    ("gpt_oss", {"gpt-oss.rope.scaling.type": "linear"}, CheckpointError, "rope.scaling.type is 'linear'; expected yarn"),
    (
        "qwen3_5",
        {"qwen35.nextn_predict_layers": 4},
        CheckpointError,
        "nextn_predict_layers is 4; expected fewer than the 4",
    ),
    ("qwen3_5", {"qwen35.ssm.inner_size": 100}, CheckpointError, "inner_size is 100; expected a multiple of the 6 heads"),
    ("qwen3_5", {"qwen35.ssm.state_size": 24}, CheckpointError, r"ssm_conv1d\.weight has 320 rows, where the metadata say 288"),
    ("qwen3_5", {"qwen35.ssm.group_count": 4}, CheckpointError, "6 value heads and 4 key heads; the first must be a multiple"),
    ("qwen3_5", {"qwen35.rope.dimension_sections": [8, 8]}, CheckpointError, "dimension_sections is .*expected three integers"),
    ("qwen3_next", {"qwen3next.attention.recurrent_layers": [True]}, CheckpointError, "expected 3 times true or false"),
    ("qwen3_next", {"qwen3next.expert_weights_norm": False}, CheckpointError, "expert_weights_norm is False; expected true"),
    (
        "nemotron_h_biases",
        {"nemotron_h.feed_forward_length": 256},
        CheckpointError,
        "length is .*expected the same for each layer",
    ),
    (
        "nemotron_h_biases",
        {"nemotron_h.feed_forward_length": [0, 0, 0]},
        CheckpointError,
        "expected the same for each layer of",
    ),
    ("nemotron_h_biases", {"nemotron_h.ssm.inner_size": 100}, CheckpointError, "expected a multiple of the 8 heads"),
    ("nemotron_h_biases", {"nemotron_h.ssm.group_count": 3}, CheckpointError, "8 heads and 3 groups"),
    (
        "nemotron_h_experts",
        {"nemotron_h_moe.expert_gating_func": 1},
        UnsupportedError,
        "expert_gating_func is 1; supported: 2",
    ),
    ("nemotron_h_experts", {"nemotron_h_moe.expert_group_count": 2}, UnsupportedError, "expert_group_count is 2; supported: 0"),
    ("ernie4_5", {"ernie4_5.expert_count": 64}, UnsupportedError, r"expert_count is 64; supported: 0"),
]


@pytest.mark.parametrize(("family", "changes", "kind", "message"), REFUSED)
def test_settings_that_edgeq_does_not_run_are_refused_by_key(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str, changes: dict[str, Any], kind: type[EdgeqError], message: str
) -> None:
    write_gguf(checkpoint(family, **FAMILIES[family]), tmp_path / "m.gguf", change=lambda keys: keys.update(changes))
    with pytest.raises(kind, match=message):
        plan_of(tmp_path / "m.gguf")


def test_local_layers_may_be_said_by_their_period(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    key = "exaone4.attention.sliding_window_pattern"
    for period, windows in ((2, (24, 0, 24)), (None, (24, 24, 24))):

        def change(keys: dict[str, Any], period: int | None = period) -> None:
            keys[key] = period
            if period is None:
                del keys[key]

        write_gguf(checkpoint("exaone4"), tmp_path / "m.gguf", change=change)
        assert plan_of(tmp_path / "m.gguf", method="none").method.config.sliding_windows == windows


def test_the_base_of_a_hunyuan_has_its_constant_in_it(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The file has the product in float32; the checkpoint has base and constant."""
    folder = checkpoint("hunyuan")
    write_gguf(folder, tmp_path / "m.gguf")
    wanted, found = (plan_of(place, method="none") for place in (folder, tmp_path / "m.gguf"))
    ours, theirs = wanted.method.config, found.method.config
    assert theirs.rope.theta == pytest.approx(ours.rope.theta, rel=1e-7) and theirs.rope.theta > 100000
    assert replace(theirs, rope=ours.rope) == ours
    expected = logits(wanted, tmp_path / "wanted.edgeq")
    assert np.abs(logits(found, tmp_path / "found.edgeq") - expected).max() < 1e-5 * np.abs(expected).max()


FALCONS = {
    "falcon_h1": {"time_step_limit": (0.0, math.inf), "tie_word_embeddings": False},
    "falcon_h1_gate": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("family", FALCONS)
def test_weights_of_a_falcon_h1_have_their_multipliers_in_them(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """So the norm before the head has none, and one of the embedding is no setting."""
    folder = checkpoint(family, **FALCONS[family])
    write_gguf(folder, tmp_path / "m.gguf", lambda name, values: Type.F32)
    wanted, found = (plan_of(place, method="none") for place in (folder, tmp_path / "m.gguf"))
    ours, theirs = wanted.method.config, found.method.config
    assert ours.embedding_multiplier not in (0, 1) and replace(ours, embedding_multiplier=1.0) == theirs
    for name, shape in wanted.method.family.tensor_shapes().items():
        if not name.startswith(("model.embed", "model.norm", "lm_head")):
            expected, read = (each.checkpoint.rows(name, 0, shape[0]) for each in (wanted, found))
            assert np.allclose(read, expected, rtol=1e-6, atol=1e-6), name
    expected = logits(wanted, tmp_path / "wanted.edgeq")
    assert np.abs(logits(found, tmp_path / "found.edgeq") - expected).max() < 1e-5 * np.abs(expected).max()


def test_integers_of_a_falcon_h1_are_kept(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Its gate, x, B and C too, which are rows of one matrix beside those of dt, which are floats."""
    write_gguf(checkpoint("falcon_h1_gate", **FALCONS["falcon_h1_gate"]), tmp_path / "m.gguf", in_type(Type.Q4_1))
    plan = plan_of(tmp_path / "m.gguf")
    file = carry_out(plan, tmp_path / "m.edgeq", silent).file
    kinds = {name: {weight.codec.name for weight in linear.weights} for name, linear in file.metadata.linears.items()}
    assert all(kind == ({"f32"} if name.endswith("ssd_dt") else {"i4 g32 offset"}) for name, kind in kinds.items())
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    for name, shape in plan.method.family.tensor_shapes().items():
        assert np.array_equal(read(name), plan.checkpoint.rows(name, 0, shape[0])), name


def test_multipliers_that_are_absent_or_0_change_nothing(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def change(keys: dict[str, Any]) -> None:
        del keys["granite.embedding_scale"]
        keys |= {"granite.attention.scale": 0.0, "granite.residual_scale": 0.0, "granite.logit_scale": 1.0}

    write_gguf(checkpoint("granite"), tmp_path / "m.gguf", change=change)
    config = plan_of(tmp_path / "m.gguf", method="none").method.config
    assert config.embedding_multiplier == 1 and config.attention_scale(0) == pytest.approx(config.head_dim**-0.5)


def test_norms_of_heads_that_command_r_plus_has_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    write_gguf(checkpoint("cohere"), tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"blk.0.attn_output", b"blk.0.attn_q_norm"))
    with pytest.raises(UnsupportedError, match=r"tensor blk\.0\.attn_q_norm\.weight has no place in a CohereForCausalLM"):
        plan_of(tmp_path / "m.gguf")


def test_biases_of_experts_in_blocks_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def kinds(name: str, values: np.ndarray[Any, Any]) -> Type:
        return Type.Q8_0 if "up_exps.bias" in name else Type.F32

    write_gguf(checkpoint("gpt_oss", **FAMILIES["gpt_oss"]), tmp_path / "m.gguf", kinds)
    with pytest.raises(CheckpointError, match="up_proj_bias is missing"):
        plan_of(tmp_path / "m.gguf")


@pytest.mark.parametrize("divisors", [[1.0] * 12 + [4.0] * 20, [4.0] + [1.0] * 31, [1.0] * 31, [1e30] * 32])
def test_pairs_of_a_gemma_4_turn_or_do_not(checkpoint: Callable[..., Path], tmp_path: Path, divisors: list[float]) -> None:
    tensors = {"rope_freqs.weight": np.array(divisors, np.float32)}
    write_gguf(checkpoint("gemma4_keys", **FAMILIES["gemma4_keys"]), tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight are not ones and then numbers from 1e\+09 on, 32 in all"):
        plan_of(tmp_path / "m.gguf")


def test_columns_move_out_of_blocks_that_are_wider_than_a_head(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Q4_K has whole blocks of 256, eight heads: integers stay where they are, and inputs are put in their order."""
    folder = checkpoint("qwen3_5", **ALIKE_HEADS, linear_num_value_heads=8)

    def kinds(name: str, values: np.ndarray[Any, Any]) -> Type:
        return Type.Q4_K if name.endswith("ssm_out.weight") else Type.F32

    write_gguf(folder, tmp_path / "m.gguf", kinds)
    plan = plan_of(tmp_path / "m.gguf")
    file = carry_out(plan, tmp_path / "m.edgeq", silent).file
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    stored = {each.name: each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    # Head h of the checkpoint is the second of h // 4 key heads' h % 4.
    heads = [2 * (h % 4) + h // 4 for h in range(8)]
    for layer in (0, 2, 3):
        raw = stored[f"blk.{layer}.ssm_out.weight"]
        values = gguf.dequantize(raw.data, raw.tensor_type).reshape(128, 8, 32)[:, heads].reshape(128, 256)
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        assert np.array_equal(plan.checkpoint.rows(name, 0, 128), values)
        assert np.array_equal(read(name), values)
    linears = {name: linear for name, linear in file.metadata.linears.items() if name.endswith("delta_out")}
    assert len(linears) == 3 and all(linear.input_order for linear in linears.values())
    expected = logits(plan_of(tmp_path / "m.gguf", method="none"), tmp_path / "floats.edgeq")
    with Model.load(file.path, target="reference", mode="a16", threads=1) as model:
        assert np.abs(model.session().prefill(TOKENS) - expected).max() < 1e-3 * np.abs(expected).max()


def test_the_layer_that_drafts_tokens_comes_after_the_others(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """`nextn_predict_layers` counts it; it is left out where it has a table of its own, and more of them have no place."""
    folder, rng = checkpoint("qwen3_5", **ALIKE_HEADS), np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm"), (128,)
    )
    shapes |= {"nextn.shared_head_norm": (128,), "attn_q_norm": (64,), "attn_k_norm": (64,), "nextn.eh_proj": (128, 256)}
    shapes |= {"attn_q": (512, 128), "attn_k": (128, 128), "attn_v": (128, 128), "attn_output": (128, 256)}
    shapes |= {"ffn_gate": (256, 128), "ffn_up": (256, 128), "ffn_down": (128, 256)}
    drafts = {name: rng.uniform(1, 2, shape).astype(np.float32) for name, shape in shapes.items()}

    def change(keys: dict[str, Any]) -> None:
        keys |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
        keys["qwen35.attention.recurrent_layers"] = [True, False, True, True, False]

    def plan(layer: int, table: str = "") -> ConversionPlan:
        tensors = {f"blk.{layer}.{name}.weight": values for name, values in drafts.items()}
        tensors |= {f"blk.{layer}.nextn.{table}.weight": np.ones((2048, 128), np.float32)} if table else {}
        write_gguf(folder, tmp_path / "m.gguf", lambda name, values: Type.F32, change, tensors)
        return plan_of(tmp_path / "m.gguf", method="none")

    config = plan_of(folder, method="none").method.config
    for table in ("embed_tokens", "shared_head_head"):
        without = plan(4, table)
        assert without.method.config == config and ["layers that draft" in note for note in without.notes()] == [True]
    found = plan(4)
    assert not found.notes()
    draft = found.method.config.draft
    assert draft and replace(found.method.config, draft_layers=0) == config and config.num_hidden_layers == 4
    for name, wanted in (
        ("embedding", drafts["nextn.eh_proj"][:, :128]),
        ("hidden", drafts["nextn.eh_proj"][:, 128:]),
        ("embedding_norm", drafts["nextn.enorm"]),
        ("hidden_norm", drafts["nextn.hnorm"]),
        ("norm", drafts["nextn.shared_head_norm"]),
        ("layers.0.input_layernorm", drafts["attn_norm"]),
        ("layers.0.self_attn.q_norm", drafts["attn_q_norm"]),
        ("layers.0.self_attn.q_proj", drafts["attn_q"].reshape(4, 2, 64, 128)[:, 0].reshape(256, 128)),
        ("layers.0.self_attn.o_proj", drafts["attn_output"]),
        ("layers.0.mlp.down_proj", drafts["ffn_down"]),
    ):
        values = found.checkpoint.rows(f"{draft.prefix}{name}.weight", 0, len(wanted))
        assert np.abs(values - wanted).max() < 1e-6, name
    with pytest.raises(UnsupportedError, match=r"tensor blk\.5\.nextn\.\w+\.weight has no place in a Qwen3_5ForCausalLM"):
        plan(5)


@pytest.mark.parametrize("form", ["qkvz", "gate_up"])
def test_files_of_other_converters_fuse_what_lies_apart(checkpoint: Callable[..., Path], tmp_path: Path, form: str) -> None:
    """The first files of Qwen3-Next have q, k, v and z as the checkpoint does; some have gate above up."""
    folder = checkpoint("qwen3_next", **FAMILIES["qwen3_next"])
    found = {name: values.float().numpy() for name, values in load_file(folder / "model.safetensors").items()}
    fused, apart = {
        "qkvz": ("blk.{}.ssm_in.weight", ("attn_qkv", "attn_gate")),
        "gate_up": ("blk.{}.ffn_gate_up_exps.weight", ("ffn_gate_exps", "ffn_up_exps")),
    }[form]
    tensors = {}
    for layer in range(3):
        p = f"model.layers.{layer}."
        name = f"{p}linear_attn.in_proj_qkvz.weight"
        if form == "qkvz" and name in found:
            tensors[fused.format(layer)] = found[name]
        if form == "gate_up":
            parts = [[found[f"{p}mlp.experts.{i}.{x}_proj.weight"] for x in ("gate", "up")] for i in range(6)]
            tensors[fused.format(layer)] = np.stack([np.concatenate(each) for each in parts])
    write_gguf(folder, tmp_path / "m.gguf", tensors=tensors, without=apart)
    wanted, plan = (plan_of(place, method="none") for place in (folder, tmp_path / "m.gguf"))
    for name, shape in wanted.method.family.tensor_shapes().items():
        theirs, ours = (each.checkpoint.rows(name, 0, shape[0]) for each in (wanted, plan))
        assert np.abs(ours - theirs).max() < 1e-6, name


def test_a_decay_that_is_none_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    tensors = {"model.layers.0.linear_attn.A_log": np.float32([-1, -1, 0, -1, -1, -1])}
    write_gguf(checkpoint("qwen3_5", **ALIKE_HEADS), tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(CheckpointError, match="A_log has NaN or infinite values"):
        carry_out(plan_of(tmp_path / "m.gguf"), tmp_path / "m.edgeq", silent)
