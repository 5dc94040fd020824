"""How the entries of a file are written down, and the vocabulary that all files have."""

from __future__ import annotations

from typing import Any

Entries = dict[str, Any]
"""Key of the metadata -> value, or name of a tensor -> [number of its type, shape]."""
LAYER_NORM = "attention.layer_norm_epsilon"
WORDS = [*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab"]


def norms(*names: str, size: int = 64) -> Entries:
    return {f"{name}.weight": [0, [size]] for name in names}


def matrices(kind: int, **shapes: list[int]) -> Entries:
    return {f"{name.replace('__', '.')}.weight": [kind, shape] for name, shape in shapes.items()}


def layers(*entries: Entries) -> Entries:
    return {f"blk.{layer}.{name}": entry for layer, found in enumerate(entries) for name, entry in found.items()}


def layer_norms(*names: str) -> Entries:
    return {f"{name}.{kind}": [0, [64]] for name in names for kind in ("weight", "bias")}


def of(name: str, epsilon: str = "attention.layer_norm_rms_epsilon", **keys: Any) -> Entries:
    """Metadata of an architecture; two underscores in a key are a dot."""
    common = {"context_length": 64, "embedding_length": 64, "feed_forward_length": 64, "rope.freq_base": 1e4}
    common |= {epsilon: 1e-5, "attention.head_count": 4}
    found = {f"{name}.{key}": value for key, value in (common | {k.replace("__", "."): v for k, v in keys.items()}).items()}
    return {"general.architecture": name, **found}
