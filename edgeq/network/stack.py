"""Layers of attention and MLP as a configuration describes them: what a decoder and a vision tower have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.delta_net import MAX_TAPS, DeltaNet
from edgeq.network.head_shape import HeadShape
from edgeq.network.json_records import check_flag, check_integer, check_layers, check_positive
from edgeq.network.mlp import GATED, MAX_INNER, check_activation, check_experts
from edgeq.network.rope import UNROTATED, Rope, alibi_slopes
from edgeq.network.ssd import StateSpace

# Above every published model, below what would overflow or exhaust memory before a check.
MAX_SIZES = {
    "vocab_size": 4_000_000,
    "hidden_size": 131_072,
    "intermediate_size": MAX_INNER,
    "num_hidden_layers": 1_024,
    "num_attention_heads": 2_048,
    "num_key_value_heads": 2_048,
    "head_dim": 1_024,
    "max_position_embeddings": 16_777_216,
}
FLAGS = ("qk_norm", "layer_norm", "pre_norms", "post_norms", "norm_topk_prob", "attention_gate", "attention_sinks",
         "attention_k_eq_v", "value_norm", "use_double_wide_mlp", "layer_scalars", "experts_beside_mlp",
         "shared_expert_gate")  # fmt: skip
PARALLEL = ("none", "one_norm", "two_norms")
QK_NORMS = ("heads", "whole", "rotated")
NORMED_RESIDUALS = ("none", "first", "all")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers of attention and MLP: what a decoder and a vision tower have in common.

    head_dim may differ from hidden_size / num_attention_heads (Qwen3).  sliding_windows has one entry per layer: a token sees
    that many last positions, its own included; 0: all.

    hidden_act              "silu", "gelu_pytorch_tanh", "relu", "gelu" (of the error function), "quick_gelu": x s(1.702 x)
    gated_mlp               whether the MLP is down(act(gate(x)) * up(x)) or down(act(up(x))); None: with the first two, the
                            others not
    qk_norm                 an RMSNorm over head_dim on queries and keys before RoPE (Qwen3, Gemma 3)
    qk_norm_kind            of qk_norm: "heads": as said; "whole": over all heads of a token together (OLMo 2); "rotated": over
                            head_dim, after RoPE (Hunyuan)
    layer_norm              LayerNorm with a bias instead of RMSNorm, with the same epsilon (OPT)
    post_norms              a norm on the outputs of attention and MLP too, before they are added (Gemma 3)
    pre_norms               a norm before attention and before the MLP; without it they read the residual stream as it is, and
                            there are post_norms (OLMo 2)
    normed_residual         which blocks add to the norm they read, x = norm(x) + f(norm(x)): "none", the "first", attention of
                            layer 0 (ModernBERT), or "all": norms after blocks, counted to what follows them (BERT)
    parallel_blocks         "none": the MLP reads what attention has added to; "one_norm": both read the same norm of the same
                            stream (Cohere); "two_norms": each a norm of its own of the same stream (GPT-NeoX)
    local_rope              rope of layers with a sliding window; None: `rope` (Gemma 3)
    layers_without_rope     indices of layers whose queries and keys are not rotated, ascending (SmolLM3)
    conv_layers             indices of layers with a gated convolution over the last conv_taps tokens in place of attention,
                            ascending, not all of them (LFM2)
    delta_net               layers of a gated delta net in place of attention; None: there are none (Qwen3.5).  They have norms
                            before their blocks and none after them, whatever pre_norms and post_norms say of others
    ssd                     layers of a state-space model in place of attention (Granite 4), or beside it (Falcon-H1), and which
                            layers are an MLP alone (Nemotron-H); None: there are none
    attention_gate          what attention gives is multiplied by the sigmoid of a gate, channel by channel (Qwen3.5)
    attention_sinks         each head has a score of its own in every softmax, whose share goes nowhere (gpt-oss)
    clip_qkv                queries, keys and values are limited to +- it before anything else; None: they are not (MPT)
    query_pre_attn_scalar   scores are divided by its square root; None: by that of head_dim (Gemma 3)
    attn_logit_softcapping   scores z become it * tanh(z / it); None: they stay (Gemma 2)
    global_head_dim, num_global_key_value_heads   of layers without a sliding window, in place of head_dim and
                            num_key_value_heads; 0: these (Gemma 4)
    attention_k_eq_v        in layers without a sliding window the values are the keys before their norm and rotation (Gemma 4)
    value_norm              an RMSNorm without a gain over each head of the values (Gemma 4)
    num_kv_shared_layers    so many last layers have no keys and values: each reads those of the last layer before them that has
                            a sliding window as it has, or none as it has none (Gemma 4)
    use_double_wide_mlp     the MLPs of these layers have twice intermediate_size (Gemma 4)
    hidden_size_per_layer_input   channels of what each layer adds to the stream after its MLP, made of the stream and of the
                            token's own row of a table for that layer; 0: nothing (Gemma 4)
    layer_scalars           after each layer the residual stream is multiplied by a number of the layer's own (Gemma 4)
    num_experts             experts of each MLP; a token uses the num_experts_per_tok that the router ranks highest, weighted
                            by their scores, with norm_topk_prob divided by the sum of their weights; 0: one MLP (Mixtral,
                            Qwen-MoE).  intermediate_size is that of an expert
    experts_beside_mlp      the one for all tokens has no gate, both have norms of their own, shares a factor each (Gemma 4)
    swiglu_limit, swiglu_alpha   of experts: down((u + 1) g sigmoid(swiglu_alpha g)), with the gate g at most swiglu_limit and u
                            from - swiglu_limit to it; a limit of None: down(silu(g) u) (gpt-oss)
    shared_expert_intermediate_size   inner channels of one more expert, for all tokens, weighted by a sigmoid; 0: none
                            (Qwen2-MoE)
    shared_expert_gate      of it; without this gate it is added as it is (Granite 4)
    expert_scores           what experts are ranked and weighted by: "softmax" of the router; "sigmoid": of each output of the
                            router, to which a bias of each expert is added for the ranking alone (Nemotron 3)
    routed_scaling_factor   of "sigmoid": the weights of experts are multiplied by it, after they were divided

    prefix   of the names of its layers and arrays in a file
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    hidden_act: str = "silu"
    gated_mlp: bool | None = None
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    layer_norm: bool = False
    post_norms: bool = False
    local_rope: Rope | None = None
    query_pre_attn_scalar: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    layers_without_rope: tuple[int, ...] = ()
    pre_norms: bool = True
    normed_residual: str = "none"
    parallel_blocks: str = "none"
    qk_norm_kind: str = "heads"
    conv_layers: tuple[int, ...] = ()
    conv_taps: int = 0
    delta_net: DeltaNet | None = None
    attention_gate: bool = False
    attention_sinks: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    global_head_dim: int = 0
    num_global_key_value_heads: int = 0
    attention_k_eq_v: bool = False
    value_norm: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    layer_scalars: bool = False
    experts_beside_mlp: bool = False
    ssd: StateSpace | None = None
    shared_expert_gate: bool = True
    expert_scores: str = "softmax"
    routed_scaling_factor: float = 1.0
    attn_logit_softcapping: float | None = None
    clip_qkv: float | None = None

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, limit in MAX_SIZES.items():
            if name in {f.name for f in fields(self)}:
                check_integer(name, getattr(self, name), 1, limit)
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        if self.gated_mlp is not None:
            check_flag("gated_mlp", self.gated_mlp)
        for name, most in {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}.items():
            check_integer(name, getattr(self, name), 0, MAX_SIZES[most])
        for kind in (self._heads, self._global_heads):
            if kind.heads % kind.kv_heads:
                raise FormatError(
                    f"config has {kind.heads} query heads and {kind.kv_heads} key/value heads; "
                    "the first must be a multiple of the second"
                )
            if kind.head_dim % 2:
                raise FormatError(f"config head_dim is {kind.head_dim}; rotary positions need an even number")
        check_activation(self.hidden_act)
        for size in (self._global_heads.head_dim, *((self.head_dim,) if self.local_rope is None else ())):
            self.rope.check(size, "rope")
        if self.local_rope is not None:
            self.local_rope.check(self.head_dim, "local_rope")
        check_positive("rms_norm_eps", self.rms_norm_eps)
        for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "clip_qkv"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.attn_logit_softcapping is not None and (self.attention_sinks or self.rope.kind == "alibi"):
            raise UnsupportedError("attn_logit_softcapping beside attention_sinks or an alibi rope is not supported")
        check_experts(self)
        self._check_norms()
        if len(self.sliding_windows) not in (0, self.num_hidden_layers):
            raise FormatError(f"config has {len(self.sliding_windows)} sliding windows for {self.num_hidden_layers} layers")
        longest = MAX_SIZES["max_position_embeddings"]
        if any(type(w) is not int or not 0 <= w <= longest for w in self.sliding_windows):
            raise FormatError(f"config sliding_windows must be integers from 0 to {longest}")
        self._check_shared_layers()
        check_layers("layers_without_rope", self.layers_without_rope, self.num_hidden_layers)
        self._check_states()

    def _check_norms(self) -> None:
        """UnsupportedError: norms, or an order of blocks, that layers of this kind do not have."""
        names = {"parallel_blocks": PARALLEL, "qk_norm_kind": QK_NORMS, "normed_residual": NORMED_RESIDUALS}
        for name, known_values in names.items():
            if getattr(self, name) not in known_values:
                raise UnsupportedError(f"{name} {getattr(self, name)!r:.80} is not known; supported: {', '.join(known_values)}")
        if not self.pre_norms and (not self.post_norms or self.parallel or self.conv_layers):
            raise UnsupportedError(
                "blocks without pre_norms are supported with post_norms, one after another, without conv_layers"
            )
        if self.parallel and (self.post_norms or self.num_experts or self.conv_layers):
            raise UnsupportedError("parallel_blocks beside post_norms, experts or conv_layers are not supported")
        plain = self.pre_norms and not (self.post_norms or self.parallel or self.num_experts or self.state_layers)
        if self.normed_residual != "none" and not plain:
            raise UnsupportedError(
                "normed_residual is supported with pre_norms, without post_norms, parallel_blocks or experts"
            )
        if self.qk_norm_kind != "heads" and not self.qk_norm:
            raise FormatError(f"config qk_norm_kind is {self.qk_norm_kind!r} without qk_norm")

    def _check_shared_layers(self) -> None:
        """FormatError, UnsupportedError: layers of several shapes, or that share keys and values, do not fit the others."""
        layers, shared = self.num_hidden_layers, self.num_kv_shared_layers
        check_integer("num_kv_shared_layers", shared, 0, layers - 1)
        for layer in range(layers - shared, layers):
            if (source := self.cache_layer(layer)) < 0 or self.window(source) != self.window(layer):
                raise FormatError(
                    f"config num_kv_shared_layers is {shared}: layer {layer} has a window of {self.window(layer)}, and none of "
                    f"the first {layers - shared} layers has keys and values for it"
                )
        check_integer("hidden_size_per_layer_input", self.hidden_size_per_layer_input, 0, MAX_SIZES["hidden_size"])
        if self.use_double_wide_mlp and not shared:
            raise FormatError("config use_double_wide_mlp without num_kv_shared_layers")
        if self.hidden_size_per_layer_input and not self.post_norms:
            raise UnsupportedError("hidden_size_per_layer_input without post_norms is not supported")
        several = not self.alike or self.attention_k_eq_v or self.hidden_size_per_layer_input
        if several and not self.value_norm:
            raise UnsupportedError(
                "heads of several shapes, num_kv_shared_layers, attention_k_eq_v or hidden_size_per_layer_input without "
                "value_norm are not supported"
            )
        other = self.parallel or self.state_layers or self.attention_gate or self.qk_norm_kind != "heads"
        if several and (other or self.clip_qkv is not None):
            raise UnsupportedError(
                "heads of several shapes, value_norm, shared layers or hidden_size_per_layer_input beside parallel_blocks, "
                "conv_layers, delta_net, ssd, attention_gate, clip_qkv or a qk_norm_kind are not supported"
            )

    def _check_states(self) -> None:
        """FormatError: layers that are none of the stack's; UnsupportedError: beside what else it has."""
        count = self.num_hidden_layers
        kinds = {"conv_layers": self.conv_layers, "delta_net.layers": self.delta_layers, "ssd.layers": self.ssd_layers}
        for name, layers in kinds.items():
            check_layers(name, layers, count)
            if layers and not any(map(self.attends, range(count))):
                raise UnsupportedError(f"{name} are all layers; supported: beside layers of attention")
        check_layers("ssd.mlp_layers", self.ssd.mlp_layers if self.ssd else (), count)
        check_integer("conv_taps", self.conv_taps, 2 if self.conv_layers else 0, MAX_TAPS if self.conv_layers else 0)
        both_norms = self.pre_norms and self.post_norms
        if self.delta_net and (self.conv_layers or both_norms or self.parallel or self.layer_norm):
            raise UnsupportedError(
                "delta_net beside conv_layers, parallel_blocks, layer_norm or pre_norms with post_norms is not supported"
            )
        if self.ssd and (self.conv_layers or self.delta_net or self.post_norms or self.parallel or self.layer_norm):
            raise UnsupportedError(
                "ssd beside conv_layers, delta_net, post_norms, parallel_blocks or layer_norm is not supported"
            )
        if self.ssd and self.ssd.mlp_layers and self.layer_scalars:
            raise UnsupportedError("ssd.mlp_layers beside layer_scalars are not supported")

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies its inner channels by an activated gate."""
        return self.hidden_act in GATED if self.gated_mlp is None else self.gated_mlp

    @property
    def clamp(self) -> tuple[float, float] | None:
        """Alpha and limit of the SwiGLU of experts; None: it has no limit."""
        return None if self.swiglu_limit is None else (self.swiglu_alpha, self.swiglu_limit)

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP read the same stream."""
        return self.parallel_blocks != "none"

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Indices of layers of a gated delta net."""
        return self.delta_net.layers if self.delta_net else ()

    @property
    def ssd_layers(self) -> tuple[int, ...]:
        """Indices of layers of a state-space model."""
        return self.ssd.layers if self.ssd else ()

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Indices of layers that have a state, ascending: in place of attention, or beside it."""
        return self.conv_layers or self.delta_layers or self.ssd_layers

    def attends(self, layer: int) -> bool:
        """Whether this layer has attention."""
        alone = layer in self.state_layers and not (self.ssd and self.ssd.beside_attention)
        return self.blocks(layer)[0] and not alone

    def blocks(self, layer: int) -> tuple[bool, bool]:
        """Whether this layer has a mixer, which is attention or what is in its place, and whether it has an MLP."""
        return self.ssd.blocks(layer) if self.ssd else (True, True)

    def attention_scale(self, layer: int) -> float:
        """The factor of the scores before the softmax of this layer."""
        scale: float = (self.query_pre_attn_scalar or self.heads_of(layer).head_dim) ** -0.5
        return scale

    def layer_rope(self, layer: int) -> Rope | None:
        """How this layer rotates its queries and keys; None: not at all."""
        if self.rope.kind in UNROTATED or layer in self.layers_without_rope:
            return None
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope

    def slopes(self, layer: int) -> tuple[float, ...]:
        """By how much the scores of each head of this layer grow from a key to the next one; empty: they do not."""
        biased = self.rope.kind == "alibi" and layer not in self.layers_without_rope
        return alibi_slopes(self.rope, self.num_attention_heads) if biased else ()

    @property
    def query_size(self) -> int:
        """Channels of all queries; where layers differ, of those with a sliding window."""
        return self._heads.query_size

    @property
    def kv_size(self) -> int:
        """Channels of all keys, and of all values; where layers differ, of those with a sliding window."""
        return self._heads.kv_size

    @property
    def _heads(self) -> HeadShape:
        return HeadShape(self.num_attention_heads, self.num_key_value_heads, self.head_dim)

    @property
    def _global_heads(self) -> HeadShape:
        heads, size = self.num_global_key_value_heads or self.num_key_value_heads, self.global_head_dim or self.head_dim
        return HeadShape(self.num_attention_heads, heads, size)

    def heads_of(self, layer: int) -> HeadShape:
        """The heads of this layer's attention."""
        return self._heads if self.window(layer) else self._global_heads

    @property
    def alike(self) -> bool:
        """Whether all layers with attention have heads of one shape, and keys and values of their own."""
        return self._heads == self._global_heads and not (self.value_norm or self.num_kv_shared_layers)

    def shares_cache(self, layer: int) -> bool:
        """Whether this layer reads the keys and values of another."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def cache_layer(self, layer: int) -> int:
        """The layer whose keys and values this one reads; -1: there is none."""
        if not self.shares_cache(layer):
            return layer
        own, first = bool(self.window(layer)), self.num_hidden_layers - self.num_kv_shared_layers
        return next((other for other in reversed(range(first)) if bool(self.window(other)) is own), -1)

    def keys_are_values(self, layer: int) -> bool:
        """Whether the values of this layer are its keys, before their norm and rotation."""
        return self.attention_k_eq_v and not self.window(layer)

    def mlp_size(self, layer: int) -> int:
        """Inner channels of the MLP of this layer; with experts of one of them."""
        return self.intermediate_size * (2 if self.use_double_wide_mlp and self.shares_cache(layer) else 1)

    def norms_before(self, layer: int) -> bool:
        """Whether the blocks of this layer read a norm of the stream."""
        return self.pre_norms or layer in self.delta_layers

    def norms_stream(self, layer: int, mlp: bool = False) -> bool:
        """Whether attention of this layer, or its MLP, adds to the norm that it reads."""
        return self.normed_residual == "all" or (self.normed_residual == "first" and layer == 0 and not mlp)

    def norms_after(self, layer: int) -> bool:
        """Whether what the blocks of this layer give goes through a norm before it is added."""
        return self.post_norms and layer not in self.delta_layers

    def window(self, layer: int) -> int:
        """Positions that a token sees in this layer, its own included; 0: all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def positions_read(self, length: int) -> float:
        """Cache positions that a token at position `length` - 1 reads, mean over the layers: sliding windows read fewer."""
        windows = self.sliding_windows
        return sum(min(w, length) if w else length for w in windows) / len(windows) if windows else float(length)
