"""A low-rank adapter (LoRA, arXiv 2106.09685) as the PEFT library saves it: adapter_config.json and adapter_model.safetensors.

W becomes W + scale B A with scale = alpha / r, or alpha / sqrt(r) where `use_rslora` says so (arXiv 2312.03732).  What changes
a model in any other way is refused by name.  The files come from strangers: cap, check, then read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import CheckpointError, InputError, UnsupportedError
from edgeq.format.safetensors import FLOATS, TensorEntry, floats, read_file, read_header, read_json

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG = 1 << 20
SOURCE_CHANNELS = "source_channels"
"""Key of a file's provenance: inputs and outputs of its linear layers are those of the checkpoint, not scaled nor rotated."""
MAX_RANK = 1024
MAX_BYTES = 4 << 30
_FACTOR = re.compile(r"base_model\.model\.([\w.]{1,400})\.lora_([AB])\.weight")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "use_qalora": (None, False),
    # Others subtract from the weights of the model what the adapter begins with.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
"""Keys that change what an adapter does, with the values under which it is W + scale B A."""


@dataclass(frozen=True, eq=False)
class Factors:
    """b a, added to a weight: a float32 [rank, columns], b float32 [rows, rank] with the scale in it."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return len(self.b), self.a.shape[1]


@dataclass(frozen=True, eq=False)
class Adapter:
    """name      of its folder
    digest    of its configuration and its factors, in hexadecimal
    factors   by the path of the module whose weight they are added to, without ".weight"
    """

    name: str
    digest: str
    factors: dict[str, Factors]

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """InputError: no such folder.  CheckpointError: damaged.  UnsupportedError: no plain LoRA."""
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; give the folder of an adapter with {CONFIG} and {WEIGHTS}")
        if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
            raise UnsupportedError(f"{folder}: the adapter is pickled ({PICKLED}), which can run code when read; save it again")
        path = folder / WEIGHTS
        digest = hashlib.blake2b(read_file(folder / CONFIG, MAX_CONFIG), digest_size=16)
        config = read_json(folder / CONFIG)
        alpha, rank, by_root = _checked(folder, config)
        try:
            headers = read_header(path)
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: no {WEIGHTS}; give the folder of a complete adapter") from None
        factors = {}
        for module, (a, b) in sorted(_pairs(path, headers, bool(config.get("rank_pattern"))).items()):
            found = a.shape[0]
            if not config.get("rank_pattern") and found != rank:
                raise CheckpointError(f"{path}: {module} has rank {found}; {CONFIG} says {rank}")
            scale = alpha / (math.sqrt(found) if by_root else found)
            read = [_values(path, f"{module}.lora_{side}", header) for side, header in (("A", a), ("B", b))]
            for values in read:
                digest.update(repr((module, values.shape)).encode() + values.tobytes())
            factors[module] = Factors(read[0], read[1] * np.float32(scale))
        return cls(folder.resolve().name, digest.hexdigest(), factors)


def _checked(folder: Path, config: dict[str, Any]) -> tuple[float, int, bool]:
    """alpha, rank, and whether the scale is by the root of the rank."""
    path, kind = folder / CONFIG, config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type {kind!r} is not supported; supported: LORA")
    for key, neutral in NEUTRAL.items():
        if not any(config.get(key) == value and type(config.get(key)) is type(value) for value in neutral):
            shown = ", ".join(json.dumps(value) for value in neutral)
            raise UnsupportedError(f"{path}: {key} is {json.dumps(config[key])[:80]}; supported: {shown}")
    rank, alpha, by_root = config.get("r"), config.get("lora_alpha"), config.get("use_rslora") or False
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise UnsupportedError(f"{path}: r is {json.dumps(rank)[:40]}; supported: 1 to {MAX_RANK}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not abs(alpha) <= 1e6:
        raise CheckpointError(f"{path}: lora_alpha is {json.dumps(alpha)[:40]}; expected a number")
    if type(by_root) is not bool:
        raise CheckpointError(f"{path}: use_rslora is {json.dumps(by_root)[:40]}; expected true or false")
    return float(alpha), rank, by_root


def _pairs(path: Path, headers: dict[str, TensorEntry], any_rank: bool) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """The two factors of each module, whose shapes fit each other."""
    sides: dict[str, dict[str, TensorEntry]] = {}
    total = 0
    for name, header in headers.items():
        found = _FACTOR.fullmatch(name)
        if not found:
            raise UnsupportedError(f"{path}: {name!r} is no lora_A or lora_B of a linear layer; others are not supported")
        if header.dtype not in FLOATS:
            raise UnsupportedError(f"{path}: {name} is stored as {header.dtype}; supported: {', '.join(FLOATS)}")
        if len(header.shape) != 2 or 0 in header.shape:
            raise UnsupportedError(f"{path}: {name} has the shape {header.shape}; supported: two sizes above 0")
        total += 4 * math.prod(header.shape)
        sides.setdefault(found[1], {})[found[2]] = header
    if not sides:
        raise CheckpointError(f"{path}: no factors in it")
    if total > MAX_BYTES:
        raise UnsupportedError(f"{path}: {total / 1e9:.1f} GB as float32; supported: {MAX_BYTES / 1e9:.1f} GB")
    pairs = {}
    for module, both in sides.items():
        if len(both) < 2:
            raise CheckpointError(f"{path}: {module} has lora_{next(iter(both))} alone; download it again")
        a, b = both["A"], both["B"]
        if a.shape[0] != b.shape[1] or a.shape[0] > min(MAX_RANK, a.shape[1], b.shape[0]):
            raise UnsupportedError(
                f"{path}: {module}: lora_A {a.shape} and lora_B {b.shape} do not fit each other, or have a rank above "
                f"{MAX_RANK} or above that of the weight"
            )
        pairs[module] = a, b
    return pairs


def _values(path: Path, name: str, header: TensorEntry) -> NDArray[np.float32]:
    values = floats(path, header.dtype, header.offset, math.prod(header.shape), name).reshape(header.shape)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{path}: {name} has NaN or infinite values; the adapter is damaged or its training diverged")
    return values


def stacked(parts: Iterable[tuple[int, Factors]], rows: int) -> Factors:
    """Several factors that act on rows of one weight as one: (first row, factors), all of the same columns."""
    found = list(parts)
    a = np.concatenate([factors.a for _, factors in found])
    b, at = np.zeros((rows, len(a)), np.float32), 0
    for row, factors in found:
        b[row : row + len(factors.b), at : at + factors.rank] = factors.b
        at += factors.rank
    return Factors(a, b)
