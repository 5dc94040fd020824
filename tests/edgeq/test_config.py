"""The configuration of a stranger's file: every key known, every value in range."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edgeq.errors import FormatError, UnsupportedError
from edgeq.format.manifest import array_shapes, fused_shapes, layer_contents
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.delta_net import DeltaNet
from edgeq.network.image_config import ImageConfig
from edgeq.network.picture_texts import PictureTexts
from edgeq.network.pooling import Pooling
from edgeq.network.rope import Rope, frequencies, picture_positions, rotation
from edgeq.network.ssd import StateSpace

PLAIN = ModelConfig(
    model_type="any",
    vocab_size=40,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10000.0),
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
DRAFTS = {"draft_layers": 1}
LONG = Rope(10000.0, "longrope", attention_factor=1.2, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
GEMMA = replace(
    PLAIN, hidden_act="gelu_pytorch_tanh", post_norms=True, qk_norm=True, local_rope=Rope(5.0), sliding_windows=(8, 0)
)
IMAGE = ImageConfig(sizing="factor", mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), min_pixels=3136, max_pixels=1 << 20)
TOWER = VisionConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=Rope(1e4, "axial", sections=(2, 2)),
    hidden_act="quick_gelu",
    layer_norm=True,
    image=IMAGE,
    image_token_id=39,
    patch_size=14,
    temporal_patch_size=2,
    merge=2,
    project_norm="patch",
    project_size=96,
    project_act="gelu",
    out_hidden_size=64,
)
CLIP_TOWER = replace(
    TOWER,
    rope=Rope(1.0, "learned"),
    image=ImageConfig(sizing="crop", mean=(0.5,) * 3, std=(0.5,) * 3, shortest_edge=30, height=28, width=28),
    merge=1,
    project_norm="none",
    project_size=64,
    position_rows=5,
    class_row=True,
    pre_norm=True,
)
TAPPED_TOWER = replace(TOWER, position_rows=9, interpolated=True, tap_layers=(0, 1))
TAPPED = replace(PLAIN, rope=Rope(1e6, sections=(4, 2, 2), interleaved=True), vision=TAPPED_TOWER)
LLAVA = replace(PLAIN, vision=CLIP_TOWER)
TILED_TOWER = replace(
    TOWER,
    rope=Rope(1.0, "learned"),
    image=ImageConfig(sizing="tiles", mean=(0.5,) * 3, std=(0.5,) * 3, tile=56, longest_edge=168),
    project_size=0,
    project_act="none",
    position_rows=16,
    texts=PictureTexts(tile="<{row}:{column}>", end="!"),
)
TILED = replace(PLAIN, vision=TILED_TOWER)
AVERAGED_TOWER = replace(
    TILED_TOWER,
    project_norm="patch",
    averaged=True,
    texts=PictureTexts(place="<picture>", shown="(<token>)"),
)
AVERAGED = replace(PLAIN, vision=AVERAGED_TOWER, whole_pictures=True)
NAFLEX_TOWER = replace(
    TILED_TOWER,
    image=ImageConfig(sizing="large", mean=(0.5,) * 3, std=(0.5,) * 3, tile=56, min_tiles=2, max_tiles=4, min_pixels=784,
                      max_pixels=3136, tolerance=1.5, least_edge=14),
    position_rows=9,
    interpolated=True,
    antialiased=True,
    project_norm="patch",
    project_eps=1e-5,
    project_size=24,
    project_act="gelu",
)  # fmt: skip
NAFLEX = replace(PLAIN, conv_layers=(0,), conv_taps=3, vision=NAFLEX_TOWER)
AXES_TOWER = replace(
    TOWER,
    image=ImageConfig(sizing="budget", mean=(0.5,) * 3, std=(0.5,) * 3, max_pixels=7840),
    post_norms=True,
    qk_norm=True,
    value_norm=True,
    position_rows=40,
    positions_by_axis=True,
    project_norm="none",
    project_size=0,
    project_act="none",
    averaged=True,
    mean_scaled=True,
)
FREE = [None] * 4
"""No bounds of a linear part."""
IN_WINDOWS = replace(PLAIN, sliding_windows=(8, 0), vision=AXES_TOWER, whole_pictures=True, pictures_in_windows=True)
QWEN_VL = replace(PLAIN, rope=Rope(1e6, sections=(2, 3, 3)), vision=TOWER)
SMOLLM = replace(PLAIN, layers_without_rope=(1,))
OLMO = replace(PLAIN, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_kind="whole")
COHERE = replace(PLAIN, layer_norm=True, parallel_blocks="one_norm")
LFM = replace(PLAIN, conv_layers=(0,), conv_taps=3)
DELTA_NET = DeltaNet(layers=(0,), key_heads=2, value_heads=4, key_dim=8, value_dim=16, taps=4)
DELTA = replace(PLAIN, delta_net=DELTA_NET, attention_gate=True)
SPACE = StateSpace(layers=(0,), heads=4, head_dim=16, groups=2, state_dim=8, taps=4, norm_eps=1e-5)
BESIDE_ATTENTION = replace(PLAIN, ssd=replace(SPACE, layers=(0, 1), norm="none", beside_attention=True))
NEMOTRON = replace(PLAIN, hidden_act="relu2", num_hidden_layers=4, ssd=replace(SPACE, mlp_layers=(1, 3)))
STATE_SPACE = replace(
    PLAIN,
    ssd=SPACE,
    num_experts=3,
    num_experts_per_tok=2,
    shared_expert_intermediate_size=24,
    shared_expert_gate=False,
)
OLMO_HYBRID = replace(OLMO, delta_net=replace(DELTA_NET, allow_neg_eigval=True, norm_eps=1e-5))
GPT_OSS = replace(PLAIN, num_experts=3, num_experts_per_tok=2, attention_sinks=True, swiglu_limit=7.0, swiglu_alpha=1.5)
GEMMA_4 = replace(
    GEMMA,
    global_head_dim=32,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    value_norm=True,
    num_kv_shared_layers=1,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=8,
    layer_scalars=True,
    final_logit_softcapping=4.0,
    rope=Rope(1e6, "proportional", partial_rotary_factor=0.25),
    num_hidden_layers=3,
    sliding_windows=(8, 0, 8),
)
BESIDE = replace(
    GEMMA, num_experts=3, num_experts_per_tok=2, shared_expert_intermediate_size=48, experts_beside_mlp=True, value_norm=True
)
BLOOM = replace(PLAIN, layer_norm=True, rope=Rope(1.0, "alibi", alibi_bias_max=6.0), embedding_norm=True, clip_qkv=4.0)
OPT = replace(PLAIN, hidden_act="relu", layer_norm=True, rope=Rope(1.0, "learned"))
EMBEDS = replace(PLAIN, tie_word_embeddings=False, pooling=Pooling("mean", normalize=True))
EXPERTS = replace(PLAIN, num_experts=3, num_experts_per_tok=2, shared_expert_intermediate_size=48)


WRITTEN = [
    PLAIN,
    GEMMA,
    SMOLLM,
    LFM,
    DELTA,
    OLMO,
    OLMO_HYBRID,
    STATE_SPACE,
    replace(PLAIN, ssd=replace(SPACE, time_step_min=0.01, time_step_max=0.5, norm="before_gate")),
    BESIDE_ATTENTION,
    NEMOTRON,
    GPT_OSS,
    GEMMA_4,
    BESIDE,
    COHERE,
    OPT,
    EXPERTS,
    EMBEDS,
    replace(PLAIN, rope=LONG),
    replace(PLAIN, gated_mlp=False),
    QWEN_VL,
    LLAVA,
    TILED,
    TAPPED,
    AVERAGED,
    NAFLEX,
    IN_WINDOWS,
    BLOOM,
]


@pytest.mark.parametrize("config", WRITTEN, ids=lambda c: c.hidden_act)
def test_what_is_written_is_read_back(config: ModelConfig) -> None:
    assert ModelConfig.from_json(config.to_json()) == config


def test_norms_and_their_sizes_follow_the_order_of_blocks() -> None:
    def norms(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return {name.removeprefix("layers.1."): shape for name, shape in layer_contents(config, 1).items() if "norm" in name}

    after = {"post_attention_norm": (64,), "post_mlp_norm": (64,)}
    assert norms(OLMO) == after | {"q_norm": (64,), "k_norm": (32,)}
    assert norms(COHERE) == {"attention_norm": (64,), "attention_norm_bias": (64,)}
    assert norms(replace(OLMO_HYBRID, delta_net=replace(DELTA_NET, layers=(1,)))) == {
        "attention_norm": (64,),
        "mlp_norm": (64,),
        "delta_norm": (16,),
    }
    assert norms(OLMO_HYBRID) == norms(OLMO)
    two = replace(COHERE, parallel_blocks="two_norms", layer_norm=False)
    assert norms(two) == {"attention_norm": (64,), "mlp_norm": (64,)}


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_mixes_between() -> None:
    rope = Rope(10000.0, "yarn", factor=8.0, original_max_position_embeddings=512, beta_fast=16.0, beta_slow=2.0)
    plain, found = frequencies(Rope(10000.0), 32), frequencies(rope, 32)
    # 32 ln(512 / (2 pi beta)) / (2 ln 10000) is 2.83 for 16 turns and 6.44 for 2: from pair 2 to pair 7.
    ratios = [f / p for f, p in zip(found, plain, strict=True)]
    wanted = [1 - 7 / 8 * min(max((i - 2) / 5, 0), 1) for i in range(16)]
    assert ratios == pytest.approx(wanted)
    exact = frequencies(replace(rope, truncate=False), 32)
    assert exact[2] == plain[2] and exact[3] > found[3] and exact[7] == pytest.approx(plain[7] / 8)
    assert not {"beta_fast", "beta_slow", "truncate"} & set(json.loads(PLAIN.to_json())["rope"])
    yarn = replace(PLAIN, rope=rope)
    assert json.loads(yarn.to_json())["rope"]["beta_slow"] == 2.0 and ModelConfig.from_json(yarn.to_json()) == yarn


def test_a_file_from_before_these_keys_is_still_read() -> None:
    data = json.loads(PLAIN.to_json())
    added = ("layer_norm", "post_norms", "local_rope", "embedding_multiplier", "query_pre_attn_scalar", "num_experts")
    for key in (*added, "num_experts_per_tok", "norm_topk_prob", "shared_expert_intermediate_size"):
        del data[key]
    for key in ("partial_rotary_factor", "attention_factor", "short_factor", "long_factor"):
        del data["rope"][key]
    assert ModelConfig.from_json(json.dumps(data)) == PLAIN


def test_a_key_for_few_files_is_not_in_the_others() -> None:
    assert "layers_without_rope" not in json.loads(PLAIN.to_json())
    assert json.loads(SMOLLM.to_json())["layers_without_rope"] == [1]
    assert not {"conv_layers", "conv_taps"} & set(json.loads(PLAIN.to_json()))
    assert json.loads(LFM.to_json())["conv_layers"] == [0] and json.loads(LFM.to_json())["conv_taps"] == 3
    assert not {"delta_net", "attention_gate"} & set(json.loads(PLAIN.to_json()))
    assert NET == {"layers": [0], "key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 16, "taps": 4}
    assert json.loads(DELTA.to_json())["attention_gate"] is True
    assert not {"ssd", "shared_expert_gate"} & set(json.loads(PLAIN.to_json()))
    assert SSD == {"layers": [0], "heads": 4, "head_dim": 16, "groups": 2, "state_dim": 8, "taps": 4, "norm_eps": 1e-5}
    assert json.loads(STATE_SPACE.to_json())["shared_expert_gate"] is False
    assert not {"attention_sinks", "swiglu_limit", "swiglu_alpha"} & set(json.loads(PLAIN.to_json()))
    assert json.loads(GPT_OSS.to_json())["swiglu_alpha"] == 1.5 and json.loads(GPT_OSS.to_json())["attention_sinks"] is True
    hybrid = json.loads(OLMO_HYBRID.to_json())["delta_net"]
    assert hybrid == NET | {"allow_neg_eigval": True, "norm_eps": 1e-5}
    assert not {"pre_norms", "parallel_blocks", "qk_norm_kind"} & set(json.loads(PLAIN.to_json()))
    assert json.loads(OLMO.to_json())["pre_norms"] is False and json.loads(OLMO.to_json())["qk_norm_kind"] == "whole"
    assert json.loads(COHERE.to_json())["parallel_blocks"] == "one_norm"
    assert not {"clip_qkv", "embedding_norm"} & set(json.loads(PLAIN.to_json()))
    assert "alibi_bias_max" not in json.loads(PLAIN.to_json())["rope"]
    assert json.loads(BLOOM.to_json())["rope"]["alibi_bias_max"] == 6.0 and json.loads(BLOOM.to_json())["clip_qkv"] == 4.0
    assert "pooling" not in json.loads(PLAIN.to_json())
    assert json.loads(EMBEDS.to_json())["pooling"] == {"kind": "mean", "normalize": True}


def test_layers_rotate_by_kind_and_by_list() -> None:
    assert [SMOLLM.layer_rope(0), SMOLLM.layer_rope(1)] == [PLAIN.rope, None]
    assert BLOOM.layer_rope(0) is None and len(BLOOM.slopes(1)) == BLOOM.num_attention_heads and PLAIN.slopes(0) == ()
    assert replace(BLOOM, layers_without_rope=(1,)).slopes(1) == ()
    assert OPT.layer_rope(0) is None and GEMMA.layer_rope(0) == GEMMA.local_rope and GEMMA.layer_rope(1) == GEMMA.rope


NET, SSD = json.loads(DELTA.to_json())["delta_net"], json.loads(STATE_SPACE.to_json())["ssd"]
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "slopes that end nowhere": (
        {"rope": {"theta": 1.0, "kind": "alibi", "alibi_bias_max": -8}},
        FormatError,
        "rope.alibi_bias_max is -8; expected a positive number",
    ),
    "slopes in some layers": (
        {"local_rope": {"theta": 1.0, "kind": "alibi"}},
        UnsupportedError,
        "local_rope of kind 'alibi' is not supported",
    ),
    "slopes after a cap": (
        {"rope": {"theta": 1.0, "kind": "alibi"}, "attn_logit_softcapping": 5.0},
        UnsupportedError,
        "attn_logit_softcapping beside attention_sinks or an alibi rope",
    ),
    "drafts without a layer": ({"draft_tokens": [0, 16]}, FormatError, "draft_tokens are 0 to 16; the layer can draft 0"),
    "drafts beyond the end": ({**DRAFTS, "draft_tokens": [0, 48]}, FormatError, "draft_tokens are 0 to 48; .* draft 40"),
    "drafts below 0": ({**DRAFTS, "draft_tokens": [-16, 16]}, FormatError, "draft_tokens are -16 to 16"),
    "half a run of drafts": ({**DRAFTS, "draft_tokens": [0]}, FormatError, "draft_tokens must be begin and end"),
    "runs of drafts that touch": ({**DRAFTS, "draft_tokens": [0, 16, 16, 32]}, FormatError, "all ascending"),
    "runs of drafts out of order": ({**DRAFTS, "draft_tokens": [16, 32, 0, 16]}, FormatError, "all ascending"),
    "half a block of drafts": ({**DRAFTS, "draft_tokens": [0, 8]}, FormatError, "multiples of 16, or the end"),
    "drafts that are no numbers": ({**DRAFTS, "draft_tokens": [0, "16"]}, FormatError, "all ascending"),
    "drafts that are no list": ({**DRAFTS, "draft_tokens": 16}, FormatError, "draft_tokens is not a list"),
    "too many runs of drafts": (
        {**DRAFTS, "vocab_size": 4096, "draft_tokens": [*range(0, 34 * 16, 16)]},
        FormatError,
        "at most 16 runs",
    ),
    "slopes of a layer that drafts": (
        {"rope": {"theta": 1.0, "kind": "alibi"}, "draft_layers": 1},
        UnsupportedError,
        "draft_layers are supported with .* rotary positions",
    ),
    "no limit": ({"clip_qkv": 0}, FormatError, "clip_qkv is 0; expected a positive number"),
    "an embedding normed by a number": ({"embedding_norm": 1}, FormatError, "embedding_norm is 1; expected true or false"),
    "pooling and a tied head": ({"pooling": {"kind": "last", "normalize": True}}, FormatError, "no head to tie"),
    "pooling as text": ({"pooling": "last"}, FormatError, "config pooling is not a JSON object"),
    "half a pooling": ({"pooling": {"kind": "last"}}, FormatError, "config pooling lacks normalize"),
    "a pooling of no kind": ({"pooling": {"kind": "max", "normalize": True}}, UnsupportedError, "pooling 'max'.*last, mean"),
    "the first token of what sees nothing": (
        {"tie_word_embeddings": False, "pooling": {"kind": "cls", "normalize": True}},
        FormatError,
        "cls without bidirectional",
    ),
    "a ranking of two numbers": (
        {"tie_word_embeddings": False, "pooling": {"kind": "mean", "normalize": False, "ranks": True, "dense": [{"width": 2}]}},
        FormatError,
        "pooling ranks, and its vector is not one number",
    ),
    "a ranking of what sees no end": (
        {"tie_word_embeddings": False, "pooling": {"kind": "mean", "normalize": False, "ranks": True, "dense": [{"width": 1}]}},
        UnsupportedError,
        "ranks without bidirectional",
    ),
    "segments of rotated positions": ({"segments": 2}, FormatError, "segments is 2; expected an integer from 1 to 1"),
    "a residual by an unknown name": ({"normed_residual": "last"}, UnsupportedError, "normed_residual 'last' is not known"),
    "a normed residual beside norms after": (
        {"normed_residual": "all", "post_norms": True},
        UnsupportedError,
        "normed_residual is supported with pre_norms, without post_norms",
    ),
    "both ways without pooling": ({"bidirectional": True}, UnsupportedError, "bidirectional without pooling"),
    "both ways as a number": ({"bidirectional": 1}, FormatError, "bidirectional is 1"),
    "dense layers as a number": (
        {"pooling": {"kind": "last", "normalize": True, "dense": 5}},
        FormatError,
        "dense is not a list",
    ),
    "too many dense layers": (
        {"pooling": {"kind": "last", "normalize": True, "dense": [{"width": 5}] * 9}},
        FormatError,
        "dense is not a list of at most 8",
    ),
    "a dense layer as a number": (
        {"pooling": {"kind": "last", "normalize": True, "dense": [5]}},
        FormatError,
        "dense layer is not a JSON object",
    ),
    "a dense layer of every width": (
        {"pooling": {"kind": "last", "normalize": True, "dense": [{"width": 1 << 20}]}},
        FormatError,
        "dense width is 1048576; expected an integer from 1 to 131072",
    ),
    "a dense layer with another activation": (
        {"pooling": {"kind": "last", "normalize": True, "dense": [{"width": 5, "activation": "relu"}]}},
        UnsupportedError,
        "activation 'relu' of a dense layer",
    ),
    "a norm of a dense layer as a number": (
        {"pooling": {"kind": "last", "normalize": True, "dense": [{"width": 5, "norm": 1}]}},
        FormatError,
        "dense norm is 1; expected true or false",
    ),
    "a pooling that is a list": ({"pooling": {"kind": ["last"], "normalize": True}}, UnsupportedError, "is not supported"),
    "a pooling that is huge": ({"pooling": {"kind": "x" * 9999, "normalize": True}}, UnsupportedError, "pooling 'x{40}'"),
    "a number to normalize": ({"pooling": {"kind": "last", "normalize": 1}}, FormatError, "pooling normalize is 1"),
    "a pooling of a newer version": (
        {"pooling": {"kind": "last", "normalize": True, "heads": 2}},
        UnsupportedError,
        "config pooling has unknown keys heads",
    ),
    "a number for a switch": ({"layer_norm": 1}, FormatError, "layer_norm is 1"),
    "no factor": ({"embedding_multiplier": 0}, FormatError, "embedding_multiplier"),
    "not a number": ({"query_pre_attn_scalar": "64"}, FormatError, "query_pre_attn_scalar"),
    "an unknown local rope": ({"local_rope": {"theta": 1.0, "kind": "dynamic"}}, UnsupportedError, "rope kind 'dynamic'"),
    "a local rope that is none": ({"local_rope": 5}, FormatError, "local_rope is not a JSON object"),
    "a key of no rope": ({"rope": {"theta": 1.0, "beta": 2}}, UnsupportedError, "unknown keys beta"),
    "more than all channels": ({"rope": {"theta": 1.0, "partial_rotary_factor": 1.5}}, FormatError, "rotates 24 of 16"),
    "half a pair": ({"rope": {"theta": 1.0, "partial_rotary_factor": 0.2}}, FormatError, "rotates 3 of 16"),
    "a list of a plain rope": ({"rope": {"theta": 1.0, "long_factor": [1.0] * 8}}, FormatError, "long_factor has 8 entries"),
    "a list too short": ({"rope": {"theta": 1.0, "kind": "longrope"}}, FormatError, "short_factor has 0 entries for 8"),
    "a list too long": ({"rope": {"theta": 1.0, "short_factor": [1.0] * 2000}}, FormatError, "short_factor is not a list"),
    "a bad entry": (
        {"rope": {"theta": 1.0, "kind": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7 + [None]}},
        FormatError,
        r"long_factor\[7\] is None",
    ),
    "a layer that is not there": ({"layers_without_rope": [2]}, FormatError, "layers_without_rope must be .* from 0 to 1"),
    "a layer twice": ({"layers_without_rope": [1, 1]}, FormatError, "layers_without_rope must be ascending"),
    "a switch for a layer": ({"layers_without_rope": [True]}, FormatError, "layers_without_rope must be"),
    "layers as text": ({"layers_without_rope": "01"}, FormatError, "layers_without_rope is not a list"),
    "no norm at all": ({"pre_norms": False}, UnsupportedError, "without pre_norms"),
    "no switch of norms": ({"pre_norms": 0, "post_norms": True}, FormatError, "pre_norms"),
    "an unknown order of blocks": ({"parallel_blocks": "three_norms"}, UnsupportedError, "'three_norms' is not known"),
    "an order that is a list": ({"parallel_blocks": ["none"]}, UnsupportedError, "is not known; supported: none, one_norm"),
    "parallel blocks before norms": (
        {"parallel_blocks": "one_norm", "post_norms": True},
        UnsupportedError,
        "parallel_blocks beside",
    ),
    "an unknown norm of heads": ({"qk_norm": True, "qk_norm_kind": "pairs"}, UnsupportedError, "'pairs' is not known"),
    "a kind of no norm": ({"qk_norm_kind": "whole"}, FormatError, "'whole' without qk_norm"),
    "a convolution of no layer": ({"conv_layers": [2], "conv_taps": 3}, FormatError, "conv_layers must be .* from 0 to 1"),
    "a convolution without taps": ({"conv_layers": [0]}, FormatError, "conv_taps is 0"),
    "a convolution of one tap": ({"conv_layers": [0], "conv_taps": 1}, FormatError, "conv_taps is 1"),
    "a convolution that is too long": ({"conv_layers": [0], "conv_taps": 65}, FormatError, "conv_taps is 65"),
    "taps of no convolution": ({"conv_taps": 3}, FormatError, "conv_taps is 3"),
    "nothing but convolutions": ({"conv_layers": [0, 1], "conv_taps": 3}, UnsupportedError, "beside layers of attention"),
    "a convolution beside experts": (
        {"conv_layers": [0], "conv_taps": 3, "num_experts": 3, "num_experts_per_tok": 1},
        UnsupportedError,
        "conv_layers beside pooling",
    ),
    "a delta net of no layer": ({"delta_net": NET | {"layers": []}}, FormatError, "delta_net has no layers"),
    "a delta net after the last layer": ({"delta_net": NET | {"layers": [2]}}, FormatError, "layers must be .* from 0 to 1"),
    "nothing but a delta net": ({"delta_net": NET | {"layers": [0, 1]}}, UnsupportedError, "beside layers of attention"),
    "layers that are no list": ({"delta_net": NET | {"layers": 0}}, FormatError, "layers is not a list"),
    "a delta net that is a list": ({"delta_net": []}, FormatError, "config delta_net is not a JSON object"),
    "a delta net without heads": ({"delta_net": NET | {"key_heads": 0}}, FormatError, "delta_net.key_heads is 0"),
    "heads that share no key": ({"delta_net": NET | {"key_heads": 3}}, FormatError, "4 value heads and 3 key heads"),
    "a head that is too wide": ({"delta_net": NET | {"key_dim": 1025}}, FormatError, "delta_net.key_dim is 1025"),
    "a delta net that is too wide": (
        {"delta_net": NET | {"value_heads": 2048, "value_dim": 1024}},
        FormatError,
        "2097184 channels; expected at most 1048576",
    ),
    "a delta net without taps": ({"delta_net": NET | {"taps": 1}}, FormatError, "delta_net.taps is 1"),
    "an eigenvalue that is no flag": (
        {"delta_net": NET | {"allow_neg_eigval": 1}},
        FormatError,
        "delta_net.allow_neg_eigval is 1; expected true or false",
    ),
    "a head norm that divides by nothing": ({"delta_net": NET | {"norm_eps": 0}}, FormatError, "delta_net.norm_eps is 0"),
    "a delta net between norms on both sides": (
        {"delta_net": NET, "post_norms": True},
        UnsupportedError,
        "pre_norms with post_",
    ),
    "sinks that are no flag": ({"attention_sinks": 1}, FormatError, "attention_sinks is 1; expected true or false"),
    "a limit of nothing": ({"swiglu_limit": 0, "num_experts": 2, "num_experts_per_tok": 1}, FormatError, "swiglu_limit is 0"),
    "an alpha of nothing": ({"swiglu_alpha": -1}, FormatError, "swiglu_alpha is -1"),
    "a limit without experts": ({"swiglu_limit": 7.0}, UnsupportedError, "swiglu_limit without experts that"),
    "more shared layers than there are": ({"num_kv_shared_layers": 2}, FormatError, "num_kv_shared_layers is 2"),
    "keys of the other kind": (
        {"num_kv_shared_layers": 1, "value_norm": True, "sliding_windows": [8, 0]},
        FormatError,
        "layer 1 has a window of 0, and none of the first 1 layers",
    ),
    "keys of a wider window": (
        {"num_kv_shared_layers": 1, "value_norm": True, "sliding_windows": [9, 8]},
        FormatError,
        "layer 1 has a window of 8",
    ),
    "values that are keys": ({"attention_k_eq_v": True}, UnsupportedError, "without value_norm"),
    "wide layers of nothing": ({"use_double_wide_mlp": True}, FormatError, "use_double_wide_mlp without num_kv_shared"),
    "heads that are odd": ({"global_head_dim": 17, "value_norm": True}, FormatError, "head_dim is 17"),
    "heads that do not divide": ({"num_global_key_value_heads": 3, "value_norm": True}, FormatError, "3 key/value heads"),
    "shared keys beside a gate": (
        {"num_kv_shared_layers": 1, "value_norm": True, "attention_gate": True},
        UnsupportedError,
        "beside parallel_blocks, conv_layers, delta_net, ssd, attention_gate",
    ),
    "experts beside nothing": (
        {"experts_beside_mlp": True, "num_experts": 2, "num_experts_per_tok": 1},
        UnsupportedError,
        "experts_beside_mlp is supported with shared_expert_intermediate_size",
    ),
    "rows of a size that is none": ({"hidden_size_per_layer_input": -1}, FormatError, "hidden_size_per_layer_input is -1"),
    "a cap of nothing": ({"final_logit_softcapping": 0}, FormatError, "final_logit_softcapping is 0"),
    "a cap of no score": ({"attn_logit_softcapping": -1.0}, FormatError, "attn_logit_softcapping is -1.0"),
    "a cap beside sinks": (
        {"attn_logit_softcapping": 5.0, "attention_sinks": True},
        UnsupportedError,
        "attn_logit_softcapping beside attention_sinks",
    ),
    "a prompt of another kind": ({"bidirectional_prompt": 1}, FormatError, "bidirectional_prompt is 1; expected true or false"),
    "a policy that is a list": ({"policy": [1]}, FormatError, "config policy is not a JSON object"),
    "a policy of half a file": ({"policy": {"actions": 1}}, FormatError, "config policy rope lacks theta"),
    "a policy of statistics that are none": (
        {"policy": {"rope": {"theta": 1.0}, "state_mean": 3}},
        FormatError,
        "state_mean is not a list of at most 65536 entries",
    ),
    "a prompt beside states": (
        {"bidirectional_prompt": True, "ssd": SSD},
        UnsupportedError,
        "bidirectional_prompt beside pooling, layers with a state",
    ),
    "a state space of no layer": ({"ssd": SSD | {"layers": []}}, FormatError, "ssd has no layers"),
    "a state space after the last layer": ({"ssd": SSD | {"layers": [2]}}, FormatError, "layers must be .* from 0 to 1"),
    "nothing but a state space": ({"ssd": SSD | {"layers": [0, 1]}}, UnsupportedError, "beside layers of attention"),
    "a state space that is a list": ({"ssd": [1]}, FormatError, "config ssd is not a JSON object"),
    "a state space without heads": ({"ssd": SSD | {"heads": 0}}, FormatError, "ssd.heads is 0"),
    "heads that share no group": ({"ssd": SSD | {"groups": 3}}, FormatError, "4 heads and 3 groups"),
    "a state that is too wide": ({"ssd": SSD | {"state_dim": 1025}}, FormatError, "ssd.state_dim is 1025"),
    "a state space of too many channels": (
        {"ssd": SSD | {"heads": 2048, "head_dim": 1024}},
        FormatError,
        "ssd has 2097184 channels",
    ),
    "a state space without taps": ({"ssd": SSD | {"taps": 1}}, FormatError, "ssd.taps is 1"),
    "a group norm that divides by nothing": ({"ssd": SSD | {"norm_eps": 0}}, FormatError, "ssd.norm_eps is 0"),
    "steps that end before they begin": (
        {"ssd": SSD | {"time_step_min": 0.5, "time_step_max": 0.1}},
        FormatError,
        "time steps from 0.5 to 0.1",
    ),
    "a step below zero": ({"ssd": SSD | {"time_step_min": -1}}, FormatError, "ssd.time_step_min is -1"),
    "a step that is true": ({"ssd": SSD | {"time_step_min": False}}, FormatError, "ssd.time_step_min is False"),
    "a huge step": ({"ssd": SSD | {"time_step_max": 10**400}}, FormatError, "ssd.time_step_max is 1000"),
    "a norm elsewhere": ({"ssd": SSD | {"norm": "first"}}, UnsupportedError, "ssd.norm 'first'.*after_gate, before_gate, none"),
    "beside what is no flag": ({"ssd": SSD | {"beside_attention": 1}}, FormatError, "ssd.beside_attention is 1"),
    "an MLP after the last layer": ({"ssd": SSD | {"mlp_layers": [2]}}, FormatError, "ssd.mlp_layers must be .* from 0 to 1"),
    "MLPs that are no list": ({"ssd": SSD | {"mlp_layers": 1}}, FormatError, "ssd mlp_layers is not a list"),
    "an MLP that is a state space": ({"ssd": SSD | {"mlp_layers": [0]}}, FormatError, "mlp_layers among its layers"),
    "no attention beside an MLP": ({"ssd": SSD | {"mlp_layers": [1]}}, UnsupportedError, "beside layers of attention"),
    "an MLP of a layer with both": (
        {"ssd": SSD | {"mlp_layers": [1], "beside_attention": True}},
        UnsupportedError,
        "mlp_layers with beside_attention",
    ),
    "scores of no experts": ({"expert_scores": "sigmoid"}, UnsupportedError, "expert_scores 'sigmoid' is supported with"),
    "a factor of shares of a softmax": ({"routed_scaling_factor": 2.0}, UnsupportedError, "is supported with expert_scores"),
    "other scores": (
        {"num_experts": 3, "num_experts_per_tok": 1, "expert_scores": "tanh"},
        UnsupportedError,
        "expert_scores 'tanh' is not known; supported: softmax, sigmoid",
    ),
    "experts of a gate of relu2": (
        {"num_experts": 3, "num_experts_per_tok": 1, "hidden_act": "relu2", "gated_mlp": True},
        UnsupportedError,
        "experts with hidden_act 'relu2' are not supported; supported: silu, and relu2 without a gate",
    ),
    "half a state space": ({"ssd": {"layers": [0]}}, FormatError, "ssd lacks groups, head_dim"),
    "a newer state space": ({"ssd": SSD | {"channels": 1}}, UnsupportedError, "ssd has unknown keys channels"),
    "a state space beside a delta net": (
        {"ssd": SSD, "delta_net": NET | {"layers": [1]}},
        UnsupportedError,
        "ssd beside conv_layers, delta_net",
    ),
    "a state space that embeds": (
        {"ssd": SSD, "pooling": {"kind": "last", "normalize": True}, "tie_word_embeddings": False},
        UnsupportedError,
        "delta_net or ssd beside pooling",
    ),
    "a state space that sees": (
        {"ssd": SSD, "vision": json.loads(LLAVA.to_json())["vision"]},
        UnsupportedError,
        "ssd beside a vision tower",
    ),
    "no gate of no shared expert": ({"shared_expert_gate": False}, UnsupportedError, "shared_expert_gate of false"),
    "half a delta net": ({"delta_net": {"layers": [0]}}, FormatError, "delta_net lacks key_dim, key_heads"),
    "a newer delta net": ({"delta_net": NET | {"channels": 1}}, UnsupportedError, "delta_net has unknown keys channels"),
    "a delta net beside convolutions": (
        {"delta_net": NET, "conv_layers": [1], "conv_taps": 3},
        UnsupportedError,
        "delta_net beside conv_layers",
    ),
    "a gate that is no switch": ({"attention_gate": 1}, FormatError, "attention_gate is 1; expected true or false"),
    "more experts than a file can hold": ({"num_experts": 20_000, "num_experts_per_tok": 1}, FormatError, "from 0 to 16384"),
    "experts as text": ({"num_experts": "3"}, FormatError, "num_experts is '3'"),
    "none of them used": ({"num_experts": 3}, FormatError, "uses none"),
    "more used than there are": ({"num_experts": 3, "num_experts_per_tok": 4}, FormatError, "num_experts_per_tok is 4"),
    "a shared expert of none": ({"shared_expert_intermediate_size": 16}, FormatError, "from 0 to 0"),
    "experts without a gate": (
        {"num_experts": 3, "num_experts_per_tok": 1, "hidden_act": "relu"},
        UnsupportedError,
        "experts with hidden_act 'relu'",
    ),
    "experts before a norm": ({"num_experts": 3, "num_experts_per_tok": 1, "post_norms": True}, UnsupportedError, "post_norms"),
}


@pytest.mark.parametrize(("keys", "kind", "message"), BAD.values(), ids=BAD)
def test_values_out_of_range_are_named(keys: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ModelConfig.from_json(json.dumps({**json.loads(PLAIN.to_json()), **keys}))


def test_a_text_model_keeps_its_keys() -> None:
    data = json.loads(PLAIN.to_json())
    assert not {"vision", "gated_mlp", "layers_without_rope"} & set(data) and not {"sections", "interleaved"} & set(
        data["rope"]
    )


def test_pictures_are_whole_in_windows_alone_where_there_are_some() -> None:
    assert IN_WINDOWS.picture_ranges == (8,) and replace(IN_WINDOWS, pictures_in_windows=False).picture_ranges == (0, 8)
    for wrong in ({"whole_pictures": False}, {"sliding_windows": ()}):
        with pytest.raises(FormatError, match="pictures_in_windows without"):
            replace(IN_WINDOWS, **wrong)


BAD_TOWERS = {
    "an unknown key": ({"windows": 1}, UnsupportedError, "config vision has unknown keys windows"),
    "a huge patch": ({"patch_size": 256, "temporal_patch_size": 16}, FormatError, "patch_width is 3145728"),
    "patches without end": ({"merge": 2**31}, FormatError, "merge is 2147483648"),
    "a token beyond the vocabulary": ({"image_token_id": 40}, FormatError, "image_token_id is 40 of 40 tokens"),
    "other features": ({"out_hidden_size": 65}, FormatError, "gives 65 channels; hidden_size is 64"),
    "one axis": ({"rope": {"theta": 1e4, "kind": "axial", "sections": [4]}}, UnsupportedError, "rope is not supported"),
    "sections too small": ({"rope": {"theta": 1e4, "kind": "axial", "sections": [2, 1]}}, FormatError, "add up to 4"),
    "sections as text": ({"rope": {"theta": 1e4, "kind": "axial", "sections": "22"}}, FormatError, "sections is not a list"),
    "an unknown norm": ({"project_norm": "all"}, UnsupportedError, "project_norm 'all'"),
    "a gated projector": ({"project_act": "silu"}, UnsupportedError, "project_act 'silu'"),
    "windows": ({"sliding_windows": [4, 0]}, UnsupportedError, "sliding windows"),
    "a projector of one layer with an activation": ({"project_size": 0}, UnsupportedError, "supported with project_act 'none'"),
    "a projector of two layers without one": ({"project_act": "none"}, UnsupportedError, "project_act 'none'"),
    "a projector of less than one": ({"project_size": -1}, FormatError, "project_size is -1"),
    "a mean of what is normed already": (
        {"averaged": True, "project_norm": "joined"},
        UnsupportedError,
        "averaged is supported",
    ),
    "a place without what is shown": ({"texts": {"place": "<i>"}}, FormatError, "place '<i>' with shown ''; expected both"),
    "texts of another kind": ({"texts": {"middle": ""}}, UnsupportedError, "texts has unknown keys middle"),
    "a number beside a picture": ({"texts": {"begin": 1}}, FormatError, "begin is 1; expected at most 256 characters"),
    "a book beside a picture": ({"texts": {"tile": "x" * 257}}, FormatError, "tile is 'xxx"),
    "no texts": ({"texts": None}, FormatError, "texts is not a JSON object"),
    "no image": ({"image": None}, FormatError, "config vision image is not a JSON object"),
    "an image of nothing": ({"image": {"sizing": "factor"}}, FormatError, "lacks mean"),
    "an image smaller than a token": (
        {"image": {"sizing": "fixed", "mean": [0, 0, 0], "std": [1, 1, 1], "height": 27, "width": 56}},
        FormatError,
        "27 x 56 pixels has no token of 28 x 28",
    ),
}


@pytest.mark.parametrize(("keys", "kind", "message"), BAD_TOWERS.values(), ids=BAD_TOWERS)
def test_values_of_a_tower_out_of_range_are_named(keys: dict[str, Any], kind: type[Exception], message: str) -> None:
    data = json.loads(QWEN_VL.to_json())
    data["vision"] |= keys
    with pytest.raises(kind, match=message):
        ModelConfig.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("config", "keys", "kind", "message"),
    [
        (LLAVA, {"position_rows": 4}, FormatError, "position_rows is 4; expected 5, one for each patch"),
        (LLAVA, {"position_rows": 0}, UnsupportedError, "'learned' rope is not supported"),
        (LLAVA, {"position_rows": 2**40}, FormatError, "position_rows is 1099511627776"),
        (LLAVA, {"image": json.loads(QWEN_VL.to_json())["vision"]["image"]}, FormatError, "expected 1, one for each"),
        (LLAVA, {"class_row": 1}, FormatError, "class_row is 1"),
        (LLAVA, {"class_row": False, "position_rows": 4, "class_feature": True}, FormatError, "without a class_row"),
        (LLAVA, {"window_size": 1, "window_layers": [0]}, UnsupportedError, "class_row and windows"),
        (LLAVA, {"merge": 2, "class_feature": True}, FormatError, "class_feature .* beside joined patches"),
        (LLAVA, {"project_eps": 1e-5}, UnsupportedError, "project_eps is supported with a project_norm, without"),
        (IN_WINDOWS, {"positions_by_axis": 1}, FormatError, "positions_by_axis is 1"),
        (IN_WINDOWS, {"interpolated": True}, UnsupportedError, "positions_by_axis is supported with an axial rope, without"),
        (IN_WINDOWS, {"position_rows": 38}, FormatError, "position_rows is 38; expected an even number, at least 40"),
        (IN_WINDOWS, {"position_rows": 41}, FormatError, "position_rows is 41; expected an even number, at least 40"),
        (IN_WINDOWS, {"averaged": False}, FormatError, "mean_scaled without averaged"),
        (
            IN_WINDOWS,
            {"clips": [[FREE] * 7] * 2},
            FormatError,
            "clips must be of 2 layers and the parts q, k, v, o, up, down of each",
        ),
        (IN_WINDOWS, {"clips": [[FREE] * 6]}, FormatError, "clips must be of 2 layers"),
        (
            IN_WINDOWS,
            {"clips": [[FREE] * 6, [FREE] * 5 + [[2, 1, None, None]]]},
            FormatError,
            "of down in layer 1: input_min is 2",
        ),
        (
            IN_WINDOWS,
            {"clips": [[[None, None, True, None]] + [FREE] * 5] * 2},
            FormatError,
            "of q in layer 0: output_min is True",
        ),
        (IN_WINDOWS, {"clips": [[[1e39, None, None, None]] * 6] * 2}, FormatError, r"input_min is 1e\+39; expected a number"),
        (IN_WINDOWS, {"clips": [[[float("nan")] * 4] * 6] * 2}, FormatError, "input_min is nan"),
        (IN_WINDOWS, {"clips": [[[None] * 3] * 7] * 2}, FormatError, "a part has not 4 bounds: input_min"),
        (IN_WINDOWS, {"clips": [[FREE] * 8]}, FormatError, "a layer is not a list of at most 7 parts"),
        (IN_WINDOWS, {"clips": {}}, FormatError, "clips is not a list of at most 1024 layers"),
        (TAPPED, {"clips": [[FREE] * 6] * 2}, UnsupportedError, "clips are supported with post_norms"),
        (IN_WINDOWS, {"num_kv_shared_layers": 1}, UnsupportedError, "num_kv_shared_layers"),
        (NAFLEX, {"antialiased": 1}, FormatError, "antialiased is 1"),
        (NAFLEX, {"antialiased": False}, UnsupportedError, "interpolated True and antialiased False"),
        (NAFLEX, {"interpolated": False}, UnsupportedError, "interpolated False and antialiased True"),
        (NAFLEX, {"position_rows": 8}, FormatError, "position_rows is 8; expected a square"),
        (TAPPED, {"antialiased": True}, UnsupportedError, "'axial' rope, 9 positions, .* antialiased True"),
        (NAFLEX, {"patch_size": 56}, FormatError, "has no token of"),
        (TILED, {"project_norm": "joined", "project_eps": -1}, FormatError, "project_eps is -1"),
        (TILED, {"project_norm": "joined", "project_eps": None}, FormatError, "project_eps is None"),
        (TILED, {"qk_norm": True, "qk_norm_kind": "rotated"}, UnsupportedError, "rotated qk norms"),
        (LLAVA, {"interpolated": True}, UnsupportedError, "'learned' rope, 5 positions, .* interpolated True"),
        (TAPPED, {"position_rows": 8}, FormatError, "position_rows is 8; expected a square"),
        (TAPPED, {"interpolated": False}, UnsupportedError, "'axial' rope, 9 positions, .* interpolated False"),
        (TAPPED, {"tap_layers": [0, 2]}, FormatError, "tap_layers must be ascending integers from 0 to 1"),
        (TAPPED, {"tap_layers": [1, 0]}, FormatError, "tap_layers must be ascending"),
        (TAPPED, {"num_hidden_layers": 3, "tap_layers": [0, 1, 2]}, FormatError, "3 tap_layers for 2 layers"),
    ],
)
def test_positions_and_taps_that_do_not_fit_are_named(
    config: ModelConfig, keys: dict[str, Any], kind: type[Exception], message: str
) -> None:
    data = json.loads(config.to_json())
    data["vision"] |= keys
    with pytest.raises(kind, match=message):
        ModelConfig.from_json(json.dumps(data))


def test_the_first_feature_of_a_class_row_has_no_place_in_a_picture() -> None:
    tower = replace(CLIP_TOWER, class_feature=True)
    assert tower.token_grid((1, 2, 2)) == (1, 1, 5) and tower.most_tokens == 5 and CLIP_TOWER.most_tokens == 4
    with pytest.raises(UnsupportedError, match="class_feature for a decoder with several rotary axes"):
        replace(QWEN_VL, vision=tower)


def test_a_tower_of_an_older_file_keeps_its_bytes() -> None:
    newer = {"position_rows", "interpolated", "class_row", "class_feature", "pre_norm", "tap_layers"}
    assert not newer & set(json.loads(QWEN_VL.to_json())["vision"])
    assert newer - {"class_feature"} <= {*json.loads(LLAVA.to_json())["vision"], *json.loads(TAPPED.to_json())["vision"]}


def test_pooling_beside_a_tower_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="pooling beside a vision tower"):
        replace(LLAVA, tie_word_embeddings=False, pooling=Pooling("last", True))


def test_sections_of_a_text_model_are_refused() -> None:
    with pytest.raises(FormatError, match="3 axes"):
        replace(PLAIN, rope=QWEN_VL.rope)
    with pytest.raises(FormatError, match="3 axes and local_rope 1"):
        replace(QWEN_VL, local_rope=Rope(1e4))
    with pytest.raises(UnsupportedError, match="sections with rope kind 'linear'"):
        replace(QWEN_VL, rope=Rope(1e4, "linear", sections=(2, 3, 3)))
    with pytest.raises(FormatError, match="every third pair"):
        replace(QWEN_VL, rope=Rope(1e4, sections=(1, 3, 4), interleaved=True))


def test_every_pair_turns_by_its_own_axis() -> None:
    plain = rotation(PLAIN.rope, 16)
    assert plain == (frequencies(PLAIN.rope, 16), ())
    assert rotation(replace(PLAIN.rope, sections=(2, 3, 3)), 16) == (plain.frequencies, (0, 0, 1, 1, 1, 2, 2, 2))
    mixed = rotation(replace(PLAIN.rope, sections=(4, 2, 2), interleaved=True), 16)
    assert mixed == (plain.frequencies, (0, 1, 2, 0, 1, 2, 0, 0))
    assert rotation(TOWER.rope, 8) == ((1.0, 0.01, 1.0, 0.01), (0, 0, 1, 1))


def test_positions_of_a_picture() -> None:
    assert picture_positions(7, (1, 2, 3)).tolist() == [[7] * 6, [7, 7, 7, 8, 8, 8], [7, 8, 9, 7, 8, 9]]
    assert picture_positions(0, (2, 1, 2)).tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]]


def test_layers_and_arrays_follow_from_the_configuration() -> None:
    assert list(layer_contents(GEMMA, 1)) == [
        f"layers.1.{name}"
        for name in ("attention_norm", "qkv", "q_norm", "k_norm", "o", "post_attention_norm", "mlp_norm", "gate_up", "down")
    ] + ["layers.1.post_mlp_norm"]
    assert dict(fused_shapes(OPT, 0))["layers.0.up"] == {"layers.0.up": (32, 64)}
    assert array_shapes(OPT)["positions"] == (256, 64) and array_shapes(OPT)["norm_bias"] == (64,)
    shapes = dict(fused_shapes(EXPERTS, 1))
    assert shapes["layers.1.router"] == {"layers.1.router": (3, 64)}
    assert shapes["layers.1.experts.2.gate_up"]["layers.1.experts.2.up"] == (32, 64)
    assert shapes["layers.1.shared.down"] == {"layers.1.shared.down": (64, 48)}


def test_a_session_longer_than_the_training_takes_the_long_factors() -> None:
    rope = replace(LONG, original_max_position_embeddings=100)
    short, long = frequencies(rope, 16, 100), frequencies(rope, 16, 101)
    assert short == frequencies(Rope(10000.0), 16) and long == tuple(f / 2 for f in short)
    assert len(frequencies(replace(Rope(10000.0), partial_rotary_factor=0.5), 16)) == 4
