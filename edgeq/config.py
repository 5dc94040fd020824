"""What the network is: sizes, norms, positions.  One frozen record, made by a converter family, stored in the file as JSON.

Field names are those of Hugging Face's config.json.  A file from a stranger goes through the same `from_json` as one of ours:
every key is known, every value in range, before anything is allocated from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from edgeq.errors import FormatError, UnsupportedError

# Above every published model, below what would overflow or exhaust memory before a check.
LIMITS = {
    "vocab_size": 4_000_000,
    "hidden_size": 131_072,
    "intermediate_size": 1_048_576,
    "num_hidden_layers": 1_024,
    "num_attention_heads": 2_048,
    "num_key_value_heads": 2_048,
    "head_dim": 1_024,
    "max_position_embeddings": 16_777_216,
}
MAX_EXPERTS = 32_768
"""The most experts of all layers together."""
ROPE_KINDS = ("default", "linear", "llama3", "longrope", "learned")
GATED, PLAIN = ("silu", "gelu_pytorch_tanh"), ("relu",)
ACTIVATIONS = (*GATED, *PLAIN)


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864), halves rotated as in Llama.

    kind    "default"; "linear" (positions divided by factor); "llama3" (Llama 3.1: low frequencies divided by factor, a smooth
            step between original_max_position_embeddings / high_freq_factor and / low_freq_factor); "longrope" (Ding et al.
            2024, arXiv 2402.13753: each frequency divided by its entry of long_factor where the context is longer than
            original_max_position_embeddings, else of short_factor; cosines and sines times attention_factor); "learned" (none:
            an entry of a table is added to the embedding instead)

    The first head_dim * partial_rotary_factor channels of a head are rotated.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    partial_rotary_factor: float = 1.0
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def rotary_size(self, head_dim: int) -> int:
        """Channels of a head that are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int, name: str) -> None:
        """UnsupportedError: the kind; FormatError: a number that is out of range or does not fit `head_dim`."""
        if self.kind not in ROPE_KINDS:
            raise UnsupportedError(f"rope kind {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        lists = {"short_factor": self.short_factor, "long_factor": self.long_factor}
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("kind", *lists)}
        numbers.update({f"{key}[{i}]": value for key, values in lists.items() for i, value in enumerate(values)})
        for key, value in numbers.items():
            check_positive(f"{name}.{key}", value)
        size = self.rotary_size(head_dim)
        if self.partial_rotary_factor > 1 or size < 2 or size % 2:
            raise FormatError(f"config {name} rotates {size} of {head_dim} channels; expected an even number of them")
        for key, values in lists.items():
            if len(values) != (size // 2 if self.kind == "longrope" else 0):
                raise FormatError(f"config {name}.{key} has {len(values)} entries for {size // 2} pairs of a {self.kind} rope")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: Llama, and the families that differ from it by a few settings.

    head_dim may differ from hidden_size / num_attention_heads (Qwen3).  sliding_windows has one entry per layer: a token sees
    that many last positions, its own included; 0: all.

    hidden_act              "silu", "gelu_pytorch_tanh": of a gated MLP;  "relu": down(relu(up(x))) without a gate (OPT)
    qk_norm                 an RMSNorm over head_dim on queries and keys before RoPE (Qwen3, Gemma 3)
    layer_norm              LayerNorm with a bias instead of RMSNorm, with the same epsilon (OPT)
    post_norms              a norm on the outputs of attention and MLP too, before they are added (Gemma 3)
    local_rope              rope of layers with a sliding window; None: `rope` (Gemma 3)
    layers_without_rope     indices of layers whose queries and keys are not rotated, ascending (SmolLM3)
    embedding_multiplier    factor of token embeddings, not of the tied head (Gemma 3)
    query_pre_attn_scalar   scores are divided by its square root; None: by that of head_dim (Gemma 3)
    num_experts             experts of each MLP; a token uses the num_experts_per_tok that the softmax of the router ranks
                            highest, weighted by it, with norm_topk_prob divided by the sum of their weights; 0: one MLP
                            (Mixtral, Qwen-MoE).  intermediate_size is that of an expert
    shared_expert_intermediate_size   inner channels of one more expert, for all tokens, weighted by a sigmoid; 0: none
                            (Qwen2-MoE)
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str = "silu"
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    layer_norm: bool = False
    post_norms: bool = False
    local_rope: Rope | None = None
    embedding_multiplier: float = 1.0
    query_pre_attn_scalar: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    layers_without_rope: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise FormatError(f"config {name} is {value!r}; expected an integer from 1 to {limit}")
        if type(self.model_type) is not str or len(self.model_type) > 64:
            raise FormatError("config model_type is not a short text")
        for name in ("tie_word_embeddings", "qk_norm", "layer_norm", "post_norms", "norm_topk_prob"):
            if type(getattr(self, name)) is not bool:
                raise FormatError(f"config {name} is {getattr(self, name)!r}; expected true or false")
        if self.num_attention_heads % self.num_key_value_heads:
            raise FormatError(
                f"config has {self.num_attention_heads} query heads and {self.num_key_value_heads} key/value heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise FormatError(f"config head_dim is {self.head_dim}; rotary positions need an even number")
        if self.hidden_act not in ACTIVATIONS:
            raise UnsupportedError(f"hidden_act {self.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        self.rope.check(self.head_dim, "rope")
        if self.local_rope is not None:
            self.local_rope.check(self.head_dim, "local_rope")
        check_positive("rms_norm_eps", self.rms_norm_eps)
        check_positive("embedding_multiplier", self.embedding_multiplier)
        if self.query_pre_attn_scalar is not None:
            check_positive("query_pre_attn_scalar", self.query_pre_attn_scalar)
        self._check_experts()
        if len(self.sliding_windows) not in (0, self.num_hidden_layers):
            raise FormatError(f"config has {len(self.sliding_windows)} sliding windows for {self.num_hidden_layers} layers")
        longest = LIMITS["max_position_embeddings"]
        if any(type(w) is not int or not 0 <= w <= longest for w in self.sliding_windows):
            raise FormatError(f"config sliding_windows must be integers from 0 to {longest}")
        plain, layers = self.layers_without_rope, self.num_hidden_layers
        if any(type(i) is not int or not 0 <= i < layers for i in plain) or list(plain) != sorted(set(plain)):
            raise FormatError(f"config layers_without_rope must be ascending integers from 0 to {layers - 1}")

    def _check_experts(self) -> None:
        limits = {
            "num_experts": MAX_EXPERTS // self.num_hidden_layers,
            "num_experts_per_tok": self.num_experts,
            "shared_expert_intermediate_size": LIMITS["intermediate_size"] if self.num_experts else 0,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= limit:
                raise FormatError(f"config {name} is {value!r}; expected an integer from 0 to {limit}")
        if self.num_experts and not self.num_experts_per_tok:
            raise FormatError(f"config has {self.num_experts} experts and uses none of them")
        if self.num_experts and self.hidden_act != "silu":
            raise UnsupportedError(f"experts with hidden_act {self.hidden_act!r} are not supported; supported: silu")
        if self.num_experts and self.post_norms:
            raise UnsupportedError("experts with a norm after them (post_norms) are not supported")

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies its inner channels by an activated gate."""
        return self.hidden_act in GATED

    @property
    def attention_scale(self) -> float:
        """The factor of the scores before the softmax."""
        scale: float = (self.query_pre_attn_scalar or self.head_dim) ** -0.5
        return scale

    def layer_rope(self, layer: int) -> Rope | None:
        """How this layer rotates its queries and keys; None: not at all."""
        if self.rope.kind == "learned" or layer in self.layers_without_rope:
            return None
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def window(self, layer: int) -> int:
        """Positions that a token sees in this layer, its own included; 0: all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def positions_read(self, length: int) -> float:
        """Cache positions that a token at position `length` - 1 reads, mean over the layers: sliding windows read fewer."""
        windows = self.sliding_windows
        return sum(min(w, length) if w else length for w in windows) / len(windows) if windows else float(length)

    def to_json(self) -> str:
        """Canonical JSON: equal configurations give equal bytes.

        `layers_without_rope` is written only where there are some, so that files without them keep the bytes, and the readers,
        that they had before the key existed.
        """
        values = asdict(self)
        if not self.layers_without_rope:
            del values["layers_without_rope"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"config is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise FormatError("config is not a JSON object")
        rope = _rope(data.pop("rope", {}), "config rope")
        local = data.pop("local_rope", None)
        lists: dict[str, Any] = {key: data.pop(key, ()) for key in ("sliding_windows", "layers_without_rope")}
        for key, entries in lists.items():
            if not isinstance(entries, (list, tuple)) or len(entries) > LIMITS["num_hidden_layers"]:
                raise FormatError(f"config {key} is not a list of at most one entry per layer")
            lists[key] = tuple(entries)
        values = _known(cls, data, "config", {"rope", "local_rope", *lists})
        local_rope = None if local is None else _rope(local, "config local_rope")
        return cls(rope=rope, local_rope=local_rope, **lists, **values)


def check_positive(name: str, value: object) -> None:
    """FormatError unless `value` is a number from 1e-30 to 1e12: powers of smaller ones overflow where they are used."""
    if type(value) not in (int, float) or not 1e-30 <= value <= 1e12:  # type: ignore[operator]
        raise FormatError(f"config {name} is {value!r}; expected a positive number")


def _rope(data: Any, where: str) -> Rope:
    values = _known(Rope, data, where)
    for key in ("short_factor", "long_factor"):
        factors = values.pop(key, ())
        if not isinstance(factors, (list, tuple)) or len(factors) > LIMITS["head_dim"]:
            raise FormatError(f"{where} {key} is not a list of at most one entry per channel")
        values[key] = tuple(factors)
    return Rope(**values)


def _known(kind: Any, data: Any, where: str, apart: set[str] | None = None) -> dict[str, Any]:
    """`data`, if all its keys are fields of `kind` and all fields without a default are present."""
    if not isinstance(data, dict):
        raise FormatError(f"{where} is not a JSON object")
    names = {f.name for f in fields(kind)} - (apart or set())
    unknown = sorted(set(data) - names)
    if unknown:
        raise UnsupportedError(f"{where} has unknown keys {', '.join(unknown)}; this file needs a newer edgeq")
    needed = {f.name for f in fields(kind) if f.default is f.default_factory} - (apart or set())
    missing = sorted(needed - set(data))
    if missing:
        raise FormatError(f"{where} lacks {', '.join(missing)}")
    return data
