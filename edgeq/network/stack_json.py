"""A stack as a file has it, in JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, TypeVar

from edgeq.network.delta_net import DeltaNet
from edgeq.network.json_records import known, list_of
from edgeq.network.rope import Rope
from edgeq.network.ssd import StateSpace
from edgeq.network.stack import MAX_SIZES, Stack

NEWER_FIELDS = ("layers_without_rope", "gated_mlp", "vision", "class_row", "class_feature", "position_rows", "interpolated",
                "pre_norm", "tap_layers", "pooling", "conv_layers", "conv_taps", "pre_norms", "parallel_blocks",
                "bidirectional", "normed_residual", "segments", "qk_norm_kind", "delta_net", "attention_gate",
                "attention_sinks", "swiglu_limit", "swiglu_alpha", "global_head_dim", "num_global_key_value_heads",
                "attention_k_eq_v", "value_norm", "num_kv_shared_layers", "use_double_wide_mlp",
                "hidden_size_per_layer_input", "layer_scalars", "experts_beside_mlp", "final_logit_softcapping", "ssd",
                "shared_expert_gate", "draft_layers", "texts", "attn_logit_softcapping", "bidirectional_prompt", "policy",
                "averaged", "whole_pictures", "state_mean", "state_std", "action_mean", "action_std", "clip_qkv",
                "embedding_norm", "project_eps", "antialiased", "positions_by_axis", "mean_scaled",
                "pictures_in_windows", "clips", "expert_scores", "routed_scaling_factor", "draft_tokens")  # fmt: skip
"""Fields that came after the first files: written only where they are set, so that other files keep their bytes, and their
readers."""
LISTS = ("sliding_windows", "layers_without_rope", "window_layers", "tap_layers", "conv_layers", "draft_tokens")
"""Fields with an entry for layers, or of few numbers."""
NETS: dict[str, type[DeltaNet] | type[StateSpace]] = {"delta_net": DeltaNet, "ssd": StateSpace}
"""Fields that say which layers have a state, with its sizes."""
RECORDS = ("image", "texts")
"""Fields of a tower that say what they hold."""
Config = TypeVar("Config", bound="Stack")


def stack_record(stack: Stack) -> dict[str, Any]:
    """What JSON holds of it; fields of NEWER_FIELDS only where they are set."""
    values = asdict(stack)
    values |= {f.name: x.to_json() for f in fields(stack) if isinstance(x := getattr(stack, f.name), Rope)}
    values |= {name: found.record() for name in (*NETS, *RECORDS) if (found := getattr(stack, name, None))}
    unset = {f.name: f.default for f in fields(stack) if f.name in NEWER_FIELDS}
    return {key: value for key, value in values.items() if key not in unset or value != unset[key]}


def read_stack(cls: type[Config], data: dict[str, Any], where: str, **made: Any) -> Config:
    """A Stack of the JSON object `data`; `made`: fields that were read already."""
    ropes: dict[str, Any] = {"rope": Rope.from_json(data.pop("rope", {}), f"{where} rope")}
    if (local := data.pop("local_rope", None)) is not None:
        ropes["local_rope"] = Rope.from_json(local, f"{where} local_rope")
    most = MAX_SIZES["num_hidden_layers"]
    keys = [f.name for f in fields(cls) if f.name in LISTS]
    lists: dict[str, Any] = {key: list_of(data, key, most, where) for key in keys}
    for name, kind in NETS.items():
        if (found := data.pop(name, None)) is not None:
            made[name] = kind.read(found, f"{where} {name}", most)
    apart = frozenset({"rope", "local_rope", *NETS, *lists, *made})
    return cls(**ropes, **lists, **made, **known(cls, data, where, apart))
