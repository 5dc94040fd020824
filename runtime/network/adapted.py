"""A model file with an adapter: the same mapped bytes, and low-rank parts of linear layers beside them.

A target compiles it as it does any file whose layers have low-rank parts: it knows nothing of adapters.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError, UnsupportedError
from edgeq.format.adapter import SOURCE_CHANNELS, Adapter, Factors, stacked
from edgeq.format.codec import Codec, pack_floats, unpack_floats
from edgeq.format.container import ModelFile
from edgeq.format.manifest import fused_shapes, layer_prefix
from edgeq.format.metadata import ALIGNMENT, Metadata, Segment
from edgeq.format.records import ArrayRef, LinearSpec, LowRank, Weight
from edgeq.runtime.arguments import instance

FACTOR = Codec("f16")
PARTS = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "qkv_proj": ("q", "k", "v"),
    "o_proj": ("o",),
    "out_proj": ("o",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "gate_up_proj": ("gate", "up"),
    "fc1": ("up",),
    "down_proj": ("down",),
    "fc2": ("down",),
}
"""A module of a decoder layer, and the parts whose rows its weight has, one below the other."""
_MODULE = re.compile(r"(?:(?:model|language_model|decoder)\.)*layers\.(\d{1,4})\.(?:self_attn\.|mlp\.)?(\w{1,40})")


class AdaptedFile(ModelFile):
    """`file` with the low-rank parts of `adapter`, which lie in memory.

    InputError: layers or sizes that the file does not have.  UnsupportedError: a file whose layers have other inputs than those
    of the checkpoint that the adapter was trained for, or layers that cannot take a low-rank part.
    """

    def __init__(self, file: ModelFile, adapter: Adapter) -> None:
        self._adapter = adapter
        self._stored = len(file.segments)
        self._parts: list[NDArray[np.uint8]] = []
        if file.metadata.provenance.get(SOURCE_CHANNELS) is not True:
            raise UnsupportedError(
                f"{file.path}: its layers may have scaled, rotated or reordered channels, for which no adapter was trained; "
                "convert the checkpoint by a method that keeps them (docs/adapters.md), or with the adapter: edgeq convert "
                "--merge-lora"
            )
        linears = dict(file.metadata.linears)
        for name, factors in self._placed(file.metadata).items():
            linears[name] = replace(linears[name], low_rank=self._low_rank(file, linears[name], factors))
        segments = [*file.segments, *(Segment(0, part.nbytes, b"") for part in self._parts)]
        super().__init__(file.path, file.header, replace(file.metadata, linears=linears), segments, file.mapped)

    @property
    def identity(self) -> str:
        """A digest of what the file and the adapter hold."""
        return hashlib.blake2b(f"{super().identity} {self._adapter.digest}".encode(), digest_size=16).hexdigest()

    def segment(self, index: int) -> NDArray[np.uint8]:
        return super().segment(index) if index < self._stored else self._parts[index - self._stored]

    def pages(self, ref: ArrayRef) -> tuple[int, int]:
        return super().pages(ref) if ref.segment < self._stored else (0, 0)

    def _placed(self, metadata: Metadata) -> dict[str, Factors]:
        """The factors of every layer of the file that has some."""
        found = defaultdict[str, list[tuple[int, Factors]]](list)
        for module, factors in self._adapter.factors.items():
            pieces = self._pieces(metadata, module)
            for index, (name, row, rows) in enumerate(pieces):
                first = sum(count for _, _, count in pieces[:index])
                found[name].append((row, Factors(factors.a, factors.b[first : first + rows])))
            expected = sum(rows for _, _, rows in pieces), metadata.linears[pieces[0][0]].columns
            if factors.shape != expected:
                raise InputError(
                    f"adapter {self._adapter.name}: {module} has a weight of {factors.shape}, in the model {expected}"
                )
        return {name: stacked(parts, metadata.linears[name].rows) for name, parts in found.items()}

    def _pieces(self, metadata: Metadata, module: str) -> list[tuple[str, int, int]]:
        """(layer of the file, first row, rows) of the parts of a module's weight."""
        config, linears, where = metadata.config, metadata.linears, f"adapter {self._adapter.name}: {module}"
        if module == "lm_head" and not config.tie_word_embeddings:
            return [("head", 0, linears["head"].rows)]
        named = _MODULE.fullmatch(module)
        if not named or named[2] not in PARTS or int(named[1]) >= config.num_hidden_layers:
            layers = f"{config.num_hidden_layers} decoder layers: {', '.join(PARTS)}"
            raise InputError(f"{where} is no layer that an adapter can change here; supported are those of {layers}")
        layer, pieces = int(named[1]), list[tuple[str, int, int]]()
        prefix, fused = layer_prefix(config, layer), dict(fused_shapes(config, layer))
        for part in PARTS[named[2]]:
            name = f"{prefix}{part}"
            if name in linears:
                pieces.append((name, 0, linears[name].rows))
                continue
            owner = next((each for each, parts in fused.items() if name in parts and each in linears), None)
            if owner is None:
                raise InputError(
                    f"{where}: the model has no such layer, or one for each expert, which adapters cannot change here"
                )
            names = list(fused[owner])
            rows = [shape[0] for shape in fused[owner].values()]
            pieces.append((owner, sum(rows[: names.index(name)]), rows[names.index(name)]))
        return pieces

    def _low_rank(self, file: ModelFile, layer: LinearSpec, factors: Factors) -> LowRank:
        """The part of a layer, after the one that the file has for it."""
        if known := layer.low_rank:
            there = [unpack_floats(file.array(w.arrays["q"]), w.codec.kind, w.rows, w.columns) for w in (known.a, known.b)]
            factors = stacked([(0, Factors(there[0], there[1])), (0, factors)], layer.rows)
        a, b = balanced(factors.a, factors.b)
        return LowRank(self._weight(b), self._weight(a))

    def _weight(self, values: NDArray[np.float32]) -> Weight:
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise UnsupportedError(f"adapter {self._adapter.name}: its factors are too large for float16; it is damaged")
        packed = pack_floats(values, FACTOR.kind)
        # As in a file: aligned, and what follows can be read.
        whole = np.zeros(packed.nbytes + 2 * ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        part = whole[start : start + packed.nbytes]
        part[:] = packed.reshape(-1).view(np.uint8)
        self._parts.append(part)
        ref = ArrayRef("f16", packed.shape, self._stored + len(self._parts) - 1)
        return Weight(FACTOR, values.shape[0], values.shape[1], {"q": ref})


def opened(path: str | os.PathLike[str], adapter: str | os.PathLike[str] | None) -> ModelFile:
    """The file at `path`, with the adapter in a folder unless that is None.  Errors as of both."""
    file = ModelFile.open(Path(path))
    return file if adapter is None else adapted(file, adapter)


def adapted(file: ModelFile, folder: str | os.PathLike[str]) -> ModelFile:
    instance("adapter", folder, (str, os.PathLike), "the folder of an adapter")
    return AdaptedFile(file, Adapter.read(Path(folder)))


def balanced(a: NDArray[np.float32], b: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The same product with factors of about the same size, by powers of two for each rank: float16 holds few sizes."""
    sizes = [np.maximum(np.abs(values).max(axis=axis), np.float32(1e-30)) for values, axis in ((a, 1), (b, 0))]
    power = np.exp2(np.round((np.log2(sizes[1]) - np.log2(sizes[0])) / 2)).astype(np.float32)
    return a * power[:, None], b / power[None, :]


def with_every_part(file: ModelFile) -> ModelFile | None:
    """The file with a low-rank part in every layer that an adapter can change, whose kernels are those of any adapter.

    None: it takes no adapters.
    """
    if file.metadata.provenance.get(SOURCE_CHANNELS) is not True:
        return None
    config, factors = file.metadata.config, dict[str, Factors]()
    modules = {parts[0]: module for module, parts in PARTS.items() if len(parts) == 1}
    for layer in range(config.num_hidden_layers):
        prefix, shapes = layer_prefix(config, layer), dict[str, tuple[int, int]]()
        for owner, parts in fused_shapes(config, layer):
            shapes |= parts if owner in file.metadata.linears else {}
        for part, module in modules.items():
            name = f"{prefix}{part}"
            if known := file.metadata.linears.get(name):
                shapes[name] = known.rows, known.columns
            if name in shapes:
                rows, columns = shapes[name]
                a, b = np.zeros((1, columns), np.float32), np.zeros((rows, 1), np.float32)
                factors[f"layers.{layer}.{module}"] = Factors(a, b)
    return AdaptedFile(file, Adapter("", "", factors)) if factors else None
