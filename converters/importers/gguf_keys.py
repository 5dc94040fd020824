"""The metadata of a GGUF file that say what its network is.

A key that changes the computation is read or refused: of the keys that begin with the architecture's name every one is read by
somebody, or listed here with the values under which it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.network.stack import MAX_SIZES

Keys = Mapping[str, Any]
Settings = dict[str, Any]
"""Keys of config.json."""

EMBEDDING, HEAD, NORM, FREQUENCIES = "token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight"
DRAFT_LAYERS = "mtp_num_hidden_layers"
"""The key of config.json that says how many layers draft tokens; they are not among the others."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"attention.causal": (True,), "use_parallel_residual": (False,)},
    **{"attention.clamp_kqv": (0.0,), "logit_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0), "embedding_scale": (0.0, 1.0)},
    **{"attention.scale": (0.0,), "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,)},
    **{"rope.scaling.finetuned": (True, False), "tensor_data_layout": ("Meta AI original pth",)},
    **{
        "expert_count": (0,),
        "expert_used_count": (0,),
        "expert_shared_count": (0,),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
    },
    **{"expert_weights_scale": (0.0, 1.0), "leading_dense_block_count": (0,), "nextn_predict_layers": (0,)},
}
"""Key after the architecture's name -> values under which it changes nothing."""


@dataclass
class GgufKeys:
    """The metadata of a file, read by key without the architecture's name; what nobody reads is refused in the end.

    shapes    of all tensors, by their names: of some settings it is all that says them
    factors   vectors that belong to the rotary embedding
    """

    metadata: Keys
    architecture: str
    place: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    factors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def value(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if type(found) is not int or not 0 <= found < 1 << 31:
            raise self.wrong(key, found, "an integer")
        return found

    def integers(self, key: str, below: int) -> list[int]:
        """An array of integers from 0 to `below`, that one not; an empty one is refused."""
        found = self.value(key)
        values = found.tolist() if isinstance(found, np.ndarray) and found.dtype.kind in "iu" else []
        if not values or min(values) < 0 or max(values) >= below:
            raise self.wrong(key, found, f"integers from 0 to {below - 1}")
        return values

    def flag(self, key: str, default: bool) -> bool:
        found = self.value(key, default)
        if type(found) is not bool:
            raise self.wrong(key, found, "true or false")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key, default)
        if type(found) not in (int, float) or not math.isfinite(found):
            raise self.wrong(key, found, "a number")
        return float(found)

    def only(self, key: str, *supported: Any) -> None:
        """UnsupportedError: the key is there and has another value."""
        found = self.value(key, supported[0])
        if not _among(found, supported):
            raise self._refused(key, found, supported)

    def has(self, tensor: str, layer: int = 0) -> bool:
        """Whether a layer has a tensor of this name."""
        return f"blk.{layer}.{tensor}" in self.shapes

    def layers(self) -> int:
        """How many there are, few enough for lists with an entry of each."""
        found = self.integer("block_count")
        if found > MAX_SIZES["num_hidden_layers"]:
            raise self.wrong("block_count", found, f"at most {MAX_SIZES['num_hidden_layers']}")
        return found

    def by_layer(self, key: str) -> list[int]:
        """An integer for each layer, where the file may have one for all."""
        found, layers = self.value(key), self.layers()
        values = [found] * layers if type(found) is int else found.tolist() if isinstance(found, np.ndarray) else []
        if len(values) != layers or any(type(each) is not int or not 0 <= each < 1 << 31 for each in values):
            raise self.wrong(key, found, f"an integer, or one for each of {layers} layers")
        return values

    def wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        shown = "missing" if value is None else f"{value!r:.60}"
        return CheckpointError(f"{self.place}: {self.architecture}.{key} is {shown}; expected {expected}")

    def check_all_read(self) -> None:
        """UnsupportedError: a key that may change the computation."""
        start = f"{self.architecture}."
        for key, found in self.metadata.items():
            name = key.removeprefix(start)
            if key.startswith(start) and name not in self.read and not _among(found, NEUTRAL.get(name, ())):
                raise self._refused(name, found, NEUTRAL.get(name, ()))

    def _refused(self, key: str, value: Any, supported: tuple[Any, ...]) -> UnsupportedError:
        instead = " or ".join(map(repr, supported)) or "files without it"
        return UnsupportedError(f"{self.place}: {self.architecture}.{key} is {value!r:.60}; supported: {instead}")


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    # An array has no truth of its own.
    return type(value) in (bool, int, float, str) and value in values
