"""What the network is: sizes, norms, positions.  One frozen record, made by a converter family, stored in the file as JSON.

Field names are those of Hugging Face's config.json.  A file from a stranger goes through the same `from_json` as one of ours:
every key is known, every value in range, before anything is allocated from it.
"""

from __future__ import annotations

import json
import math
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
ROPE_KINDS = ("default", "linear", "llama3")
ACTIVATIONS = ("silu",)


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864), halves rotated as in Llama.

    kind    "default"; "linear" (positions divided by factor); "llama3" (Llama 3.1: low frequencies divided by factor, a smooth
            step between original_max_position_embeddings / high_freq_factor and / low_freq_factor)
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama line.

    head_dim may differ from hidden_size / num_attention_heads (Qwen3).  sliding_windows has one entry per layer: a row sees
    that many last positions, itself included; 0 sees all.  qk_norm: an RMSNorm over head_dim on queries and keys before RoPE
    (Qwen3).
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

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise FormatError(f"config {name} is {value!r}; expected an integer from 1 to {limit}")
        if type(self.model_type) is not str or len(self.model_type) > 64:
            raise FormatError("config model_type is not a short text")
        for name in ("tie_word_embeddings", "qk_norm"):
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
        if self.rope.kind not in ROPE_KINDS:
            raise UnsupportedError(f"rope kind {self.rope.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        numbers = {f"rope.{f.name}": getattr(self.rope, f.name) for f in fields(self.rope) if f.name != "kind"}
        for name, value in {**numbers, "rms_norm_eps": self.rms_norm_eps}.items():
            if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= 1e12:
                raise FormatError(f"config {name} is {value!r}; expected a positive number")
        if len(self.sliding_windows) not in (0, self.num_hidden_layers):
            raise FormatError(f"config has {len(self.sliding_windows)} sliding windows for {self.num_hidden_layers} layers")
        longest = LIMITS["max_position_embeddings"]
        if any(type(w) is not int or not 0 <= w <= longest for w in self.sliding_windows):
            raise FormatError(f"config sliding_windows must be integers from 0 to {longest}")

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def window(self, layer: int) -> int:
        """Positions a row of this layer sees, itself included; 0: all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def positions_read(self, length: int) -> float:
        """Cache positions that a row at position `length` - 1 reads, mean over the layers: a sliding window reads fewer."""
        windows = self.sliding_windows
        return sum(min(w, length) if w else length for w in windows) / len(windows) if windows else float(length)

    def kv_bytes_per_position(self) -> int:
        """Bytes of an f16 cache for one position over all layers."""
        return 2 * 2 * self.kv_size * self.num_hidden_layers

    def to_json(self) -> str:
        """Canonical: same configuration, same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"config is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise FormatError("config is not a JSON object")
        rope = _known(Rope, data.pop("rope", {}), "config rope")
        windows = data.pop("sliding_windows", ())
        if not isinstance(windows, (list, tuple)) or len(windows) > LIMITS["num_hidden_layers"]:
            raise FormatError("config sliding_windows is not a list of at most one entry per layer")
        values = _known(cls, data, "config", {"rope", "sliding_windows"})
        return cls(rope=Rope(**rope), sliding_windows=tuple(windows), **values)


def _known(kind: Any, data: Any, where: str, apart: set[str] | None = None) -> dict[str, Any]:
    """`data` if its keys are fields of `kind` and every field without default is there."""
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
