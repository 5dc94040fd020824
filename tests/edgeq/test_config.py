"""The configuration of a stranger's file: every key known, every value in range."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edgeq.config import ModelConfig, Rope
from edgeq.errors import FormatError, UnsupportedError
from edgeq.manifest import array_shapes, fused_shapes, layer_contents
from edgeq.rope import frequencies

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
LONG = Rope(10000.0, "longrope", attention_factor=1.2, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8)
GEMMA = replace(
    PLAIN, hidden_act="gelu_pytorch_tanh", post_norms=True, qk_norm=True, local_rope=Rope(5.0), sliding_windows=(8, 0)
)
SMOLLM = replace(PLAIN, layers_without_rope=(1,))
OPT = replace(PLAIN, hidden_act="relu", layer_norm=True, rope=Rope(1.0, "learned"))
EXPERTS = replace(PLAIN, num_experts=3, num_experts_per_tok=2, shared_expert_intermediate_size=48)


@pytest.mark.parametrize("config", [PLAIN, GEMMA, SMOLLM, OPT, EXPERTS, replace(PLAIN, rope=LONG)], ids=lambda c: c.hidden_act)
def test_what_is_written_is_read_back(config: ModelConfig) -> None:
    assert ModelConfig.from_json(config.to_json()) == config


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


def test_layers_rotate_by_kind_and_by_list() -> None:
    assert [SMOLLM.layer_rope(0), SMOLLM.layer_rope(1)] == [PLAIN.rope, None]
    assert OPT.layer_rope(0) is None and GEMMA.layer_rope(0) == GEMMA.local_rope and GEMMA.layer_rope(1) == GEMMA.rope


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a number for a switch": ({"layer_norm": 1}, FormatError, "layer_norm is 1"),
    "no factor": ({"embedding_multiplier": 0}, FormatError, "embedding_multiplier"),
    "not a number": ({"query_pre_attn_scalar": "64"}, FormatError, "query_pre_attn_scalar"),
    "an unknown local rope": ({"local_rope": {"theta": 1.0, "kind": "yarn"}}, UnsupportedError, "rope kind 'yarn'"),
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
