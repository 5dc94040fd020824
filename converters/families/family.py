"""A family of decoders as data, and what follows from it for one configuration.

Every key of config.json that changes the computation is either read, or listed with the values under which it changes nothing;
any other value is refused by key.  Keys that neither this description nor transformers' model code reads cannot change the
computation and are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgeq.converters.checkpoint.checkpoint import TensorSource
from edgeq.format.manifest import (
    StackContents,
    dense_shapes,
    draft_input,
    draft_output,
    embedding_norm_shapes,
    layer_contents,
    layer_prefix,
    patch_contents,
    policy_input,
    policy_output,
    projector_contents,
    table_shapes,
)
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.draft_stack import DraftStack
from edgeq.network.policy_stack import PolicyStack
from edgeq.network.pooling import Pooling
from edgeq.network.stack import Stack

Values = Mapping[str, Any]

EMBEDDING, POSITIONS = "model.embed_tokens.weight", "model.embed_positions.weight"
LAYER_ROWS, ROW_CONTEXT = "model.layer_rows.weight", "model.row_context.weight"
ROW_CONTEXT_NORM = "model.row_context_norm.weight"
EMBEDDING_NORM = "model.embedding_norm"
NORM, NORM_BIAS, HEAD = "model.norm.weight", "model.norm.bias", "lm_head.weight"
# Part of a decoder layer -> its module (torch_decoder.py).
LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "attention_gate": "self_attn.gate_proj",
    "conv_in": "self_attn.in_proj",
    "conv_out": "self_attn.out_proj",
    "delta_qkv": "self_attn.qkv_proj",
    "delta_gate": "self_attn.gate_proj",
    "delta_out": "self_attn.o_proj",
    "ssd_in": "self_attn.in_proj",
    "ssd_out": "self_attn.out_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "row_gate": "rows.gate_proj",
    "row_out": "rows.out_proj",
}
NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "attention_output_norm",
    "mlp_norm": "post_attention_layernorm",
    "post_mlp_norm": "mlp_output_norm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "conv": "self_attn.conv",
    "delta_conv": "self_attn.conv",
    "decay_log": "self_attn.decay",
    "dt": "self_attn.dt",
    "delta_norm": "self_attn.norm",
    "ssd_conv": "self_attn.conv",
    "skip": "self_attn.skip",
    "ssd_norm": "self_attn.norm",
    "sinks": "self_attn.sinks",
    "layer_scalar": "layer_scalar",
    "row_norm": "rows.norm",
    "shared_norm": "mlp.shared_norm",
    "router_norm": "mlp.router_norm",
    "expert_scales": "mlp.expert_scales",
    "expert_biases": "mlp.expert_biases",
    "experts_input_norm": "mlp.experts_input_norm",
    "experts_norm": "mlp.experts_norm",
}
IN_FLOATS = {
    "router": "mlp.gate",
    "shared_gate": "mlp.shared_expert_gate",
    "delta_b": "self_attn.b",
    "delta_a": "self_attn.a",
    "ssd_dt": "self_attn.dt_rates",
}
"""Those that are never rounded."""
TAP, EXPERT = re.compile(r"^taps\.\d+\."), re.compile(r"^experts\.\d+\.")


def dense_tensor(name: str) -> str:
    """The tensor of an array of `dense_shapes`."""
    layer, _, beside = name.partition("_")
    kinds = {"": "weight", "bias": "bias", "norm": "norm.weight"}
    return f"{layer}.{kinds[beside]}"


def embedding_norm_tensor(name: str) -> str:
    """The tensor of an array of `embedding_norm_shapes`."""
    return f"{EMBEDDING_NORM}.{'bias' if name.endswith('_bias') else 'weight'}"


def linear_module(part: str) -> str:
    """The module of a linear part of a decoder layer: q ... down, router, shared_gate, experts.7.gate, shared.gate ..."""
    if part in LINEARS or part in IN_FLOATS:
        return {**LINEARS, **IN_FLOATS}[part]
    owner, _, name = part.rpartition(".")
    return f"mlp.{'shared_expert' if owner == 'shared' else owner}.{name}_proj"


@dataclass(frozen=True)
class ScaleMapping:
    """One AWQ scale: `absorber` divides its output channels by s, `consumers` multiply their input channels by it.

    inspected         the module of the decoder layer whose output error chooses s
    multi_head_only   outputs of the absorber are inputs of the consumer one to one only if every query head has a value head
    followers         floats that read the same channels: multiplied by s too, never rounded
    """

    absorber: str
    consumers: tuple[str, ...]
    inspected: str
    multi_head_only: bool = False
    followers: tuple[str, ...] = ()


AFTER_VALUES = ScaleMapping("v", ("o",), "self_attn.o_proj", multi_head_only=True)
ATTENTION_MAPPINGS = (ScaleMapping("attention_norm", ("q", "k", "v"), "self_attn"), AFTER_VALUES)
MLP_MAPPINGS = (
    ScaleMapping("mlp_norm", ("gate", "up"), "mlp"),
    ScaleMapping("up", ("down",), "mlp.down_proj"),
)


def mixer_mappings(config: Stack) -> tuple[ScaleMapping, ...]:
    """Those of attention, and of what layers with a state have in its place."""
    gate = ("attention_gate",) if config.attention_gate else ()
    beside = (("ssd_in",), ("ssd_dt",)) if config.ssd and config.ssd.beside_attention else ((), ())
    return (
        ScaleMapping("attention_norm", ("q", "k", "v", *gate, *beside[0]), "self_attn", followers=beside[1]),
        ScaleMapping("attention_norm", ("conv_in",), "self_attn"),
        ScaleMapping("attention_norm", ("delta_qkv", "delta_gate"), "self_attn", followers=("delta_b", "delta_a")),
        *(() if beside[0] else (ScaleMapping("attention_norm", ("ssd_in",), "self_attn", followers=("ssd_dt",)),)),
        ScaleMapping("ssd_norm", ("ssd_out",), "self_attn.out_proj"),
        AFTER_VALUES,
    )


def network_mappings(config: Stack) -> tuple[ScaleMapping, ...]:
    """Those that the order of norms and linear layers allows: a gate lets a factor pass, an activation without one does not."""
    if config.normed_residual == "all":
        # What a norm gives is the residual too: no factor of it passes.
        return (AFTER_VALUES, *(MLP_MAPPINGS[1:] if config.gated else ()))
    readers = ("gate", "up") if config.gated else ("up",)
    mixer, down = mixer_mappings(config), MLP_MAPPINGS[1:] if config.gated else ()
    if config.normed_residual == "first":
        # No scale passes the norm that attention of the first layer is added to; mappings are those of every layer.
        mixer = (AFTER_VALUES,)
    if config.parallel_blocks == "one_norm":
        attention, *others = mixer
        return (replace(attention, consumers=(*attention.consumers, *readers)), *others, *down)
    return (*mixer, ScaleMapping("mlp_norm", readers, "mlp" if config.gated else "mlp.up_proj"), *down)


def no_windows(values: Values, layers: int) -> tuple[int, ...]:
    return ()


def no_sources(config: Any) -> dict[str, TensorSource]:
    return {}


def nothing_unused(config: Any, tensor: str) -> bool:
    return False


@dataclass(frozen=True)
class FamilyDescription:
    """What the checkpoints of one architecture have in common.

    defaults   transformers' own, for keys that config.json may leave out
    neutral    values of other keys that have no effect
    settings   fields of `ModelConfig` that not all families have in the same way, constant or read from config.json; of a tower
               all fields of `VisionConfig` but how a picture becomes pixels
    windows    sliding window of every layer
    keys       what config.json calls a key of `ModelConfig`, where it differs
    biases     linear parts of a decoder layer that have one; of experts "experts.gate" ...
    sources    where the tensors lie that the checkpoint does not have under the names used here
    derived    ends of names of tensors that follow from the configuration: old checkpoints carry them
    tower      of the vision tower, whose keys are in `vision_config`; those of the decoder may be in `text_config`
    outside    of a tower: keys that it takes from the decoder or from beside `vision_config` -> what they are called there
    renamed    beginnings of names of tensors in some checkpoints -> those that `sources` and the decoder's names have; of
               several that fit the first is taken
    unused     whether a tensor that is left over is one that the network does not read
    nested     keys of a decoder without a tower are in `text_config`, as those of one with a tower may be
    left_out   parts of the model that are not converted, for people; their tensors are `unused`
    headless   it embeds texts, whatever its name ends in: there is a pooling
    own_code   published checkpoints name code of their own, which computes what transformers has since then itself
    scores     of a reranker: what makes a score of the states of a pair of texts
    variants   the same architecture around another decoder: its description by the configuration
    template   the chat template of checkpoints that have none: how transformers' processor makes a prompt
    clipped    of a tower whose linear layers limit what they read and give: the modules that have the bounds of its layers'
               parts, in the order of edgeq.pictures.tower_clips; None: there are no bounds
    inside     the key of the configuration's object that has the decoder and the tower; empty: they are in it
    policy     the expert of a model that makes actions; None: it makes none
    drafts     whether a checkpoint with these keys and tensors has a layer that drafts tokens, whose `sources` are known; None:
               none has
    """

    architecture: str
    defaults: Values
    neutral: Mapping[str, tuple[Any, ...]]
    settings: Callable[[Values], dict[str, Any]]
    windows: Callable[[Values, int], tuple[int, ...]] = no_windows
    keys: Mapping[str, str] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    sources: Callable[[Any], dict[str, TensorSource]] = no_sources
    derived: tuple[str, ...] = (".rotary_emb.inv_freq",)
    mappings: Callable[[Stack], tuple[ScaleMapping, ...]] = network_mappings
    tower: FamilyDescription | None = None
    outside: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    unused: Callable[[Any, str], bool] = nothing_unused
    nested: bool = False
    left_out: tuple[str, ...] = ()
    headless: bool = False
    own_code: bool = False
    scores: Callable[[Values], Pooling] | None = None
    variants: Callable[[Values], FamilyDescription] | None = None
    template: str = ""
    clipped: Callable[[VisionConfig], Sequence[Sequence[str]]] | None = None
    inside: str = ""
    policy: Callable[[Values], PolicyStack] | None = None
    drafts: Callable[[Values, Container[str]], bool] | None = None


def layer_tensors_of(config: Stack) -> dict[str, tuple[int, ...]]:
    """The tensors of all layers of a stack without biases, and their shapes, under the names used here."""
    plain = Family(FamilyDescription("", {}, {}, dict), config)
    return {name: shape for i in range(config.num_hidden_layers) for name, shape in plain.layer_parts(i).values()}


@dataclass(frozen=True)
class Family:
    """The family of one checkpoint, whose decoder or tower is `config`."""

    description: FamilyDescription
    config: Stack

    @property
    def architecture(self) -> str:
        return self.description.architecture

    @property
    def prefix(self) -> str:
        """What the names of its tensors begin with."""
        return self.config.prefix or "model."

    @property
    def tower(self) -> Family | None:
        """The family of the vision tower beside this decoder."""
        vision = self.config.vision if isinstance(self.config, ModelConfig) else None
        return Family(self.description.tower, vision) if vision and self.description.tower else None

    @property
    def draft(self) -> Family | None:
        """The family of the layer that drafts tokens for this decoder."""
        draft = self.config.draft if isinstance(self.config, ModelConfig) else None
        return Family(self.description, draft) if draft else None

    @property
    def policy(self) -> Family | None:
        """The family of the expert that makes actions of what this decoder reads."""
        policy = self.config.policy if isinstance(self.config, ModelConfig) else None
        return Family(self.description, policy) if policy else None

    def sources(self) -> dict[str, TensorSource]:
        """Where the tensors lie, the tower's too."""
        of_tower = self.tower.sources() if self.tower else {}
        return self.description.sources(self.config) | of_tower

    def layer_parts(self, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Part of a layer -> tensor name and shape, in execution order: attention_norm, q, q.bias, k ... down."""
        prefix, tensors = layer_prefix(self.config, layer), f"{self.prefix}layers.{layer}."
        parts: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, content in layer_contents(self.config, layer).items():
            if isinstance(content, tuple):
                part = name.removeprefix(prefix)
                kind = "bias" if part.endswith("_bias") else "weight"
                parts[part] = f"{tensors}{NORMS[part.removesuffix('_bias')]}.{kind}", content
                continue
            for linear, (rows, columns) in content.items():
                part = linear.removeprefix(prefix)
                parts[part] = f"{tensors}{linear_module(part)}.weight", (rows, columns)
                if EXPERT.sub("experts.", part) in self.description.biases:
                    parts[f"{part}.bias"] = f"{tensors}{linear_module(part)}.bias", (rows,)
        return parts

    def largest_layer(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The parts of the layer with the most weights."""
        layers = map(self.layer_parts, range(self.config.num_hidden_layers))
        return max(layers, key=lambda parts: sum(math.prod(shape) for _, shape in parts.values()))

    def layer_tensors(self, layer: int) -> dict[str, str]:
        """Part of a layer -> tensor name."""
        return {part: name for part, (name, _) in self.layer_parts(layer).items()}

    def end_parts(self, contents: StackContents) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The same of what a tower, or a layer that drafts, has before and after its layers."""
        parts: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, content in contents.items():
            part = name.removeprefix(self.prefix)
            if isinstance(content, tuple):
                kind = "bias" if part.endswith("_bias") else "weight"
                parts[part] = f"{self.prefix}{part.removesuffix('_bias')}.{kind}", content
                continue
            rows, columns = content[name]
            parts[part] = f"{name}.weight", (rows, columns)
            # The projectors of taps are like the last one.
            if TAP.sub("", part) in self.description.biases:
                parts[f"{part}.bias"] = f"{name}.bias", (rows,)
        return parts

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model needs and its shape; of a decoder without those of its tower and of the layer that drafts."""
        config = self.config
        layers = [dict(self.layer_parts(layer).values()) for layer in range(config.num_hidden_layers)]
        if isinstance(config, (VisionConfig, DraftStack, PolicyStack)):
            if isinstance(config, VisionConfig):
                ends = patch_contents(config) | projector_contents(config)
            elif isinstance(config, PolicyStack):
                ends = policy_input(config) | policy_output(config)
            else:
                ends = draft_input(config) | draft_output(config)
            return dict(self.end_parts(ends).values()) | {name: shape for layer in layers for name, shape in layer.items()}
        assert isinstance(config, ModelConfig)
        hidden = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
        if config.layer_norm:
            shapes[NORM_BIAS] = (hidden,)
        if config.rope.kind == "learned":
            shapes[POSITIONS] = (config.segments * config.max_position_embeddings, hidden)
        if tables := table_shapes(config):
            shapes |= {LAYER_ROWS: tables["layer_rows"], ROW_CONTEXT: tables["row_context"]}
            shapes[ROW_CONTEXT_NORM] = (config.hidden_size_per_layer_input,)
        for name, shape in embedding_norm_shapes(config).items():
            shapes[embedding_norm_tensor(name)] = shape
        for name, shape in dense_shapes(config).items():
            shapes[dense_tensor(name)] = shape
        if not config.tie_word_embeddings and config.pooling is None:
            shapes[HEAD] = (config.vocab_size, hidden)
        for layer in layers:
            shapes.update(layer)
        return shapes

    @property
    def mappings(self) -> list[ScaleMapping]:
        """The scales that layers can absorb: v -> o only where v has as many outputs as o has inputs (no GQA), and no limit,
        and where no other layer reads the values too, as an expert's reads its decoder's; none where layers are bounded."""
        config = self.config
        if isinstance(config, VisionConfig) and config.clips:
            return []
        policy = isinstance(config, PolicyStack) or (isinstance(config, ModelConfig) and config.policy is not None)
        multi_head = config.kv_size == config.query_size and config.alike and config.clip_qkv is None and not policy
        return [m for m in self.description.mappings(config) if multi_head or not m.multi_head_only]

    def awq_mappings(self, layer: int) -> list[ScaleMapping]:
        """Those whose parts this layer has."""
        parts = self.layer_parts(layer).keys()
        return [mapping for mapping in self.mappings if parts >= {mapping.absorber, *mapping.consumers}]
