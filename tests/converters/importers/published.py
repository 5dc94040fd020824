"""Tiny folders of quantized weights as other programs publish them, written from the formulas of their formats.

Each writer takes records of integers, zero points and scales, and gives the tensors and the keys of config.json that say so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file

from tests.converters.importers.packers import awq_fast, awq_gemm, gptq_planar, old_words, stream

Tensors = dict[str, NDArray[Any]]
TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@dataclass(frozen=True, eq=False)
class Record:
    """w[:, j] = scale * (q[:, j] - zero), or scale * q[:, j] + offset, by the group that channel j is in; `order`: of the
    channels, group after group."""

    q: NDArray[np.uint8]
    zero: NDArray[np.uint8]
    scale: NDArray[np.float16]
    bits: int
    group_size: int
    order: NDArray[np.int64] | None = None
    offset: NDArray[np.float16] | None = None

    @property
    def index(self) -> NDArray[np.int32]:
        """The group of each channel."""
        found = np.arange(self.q.shape[1]) // self.group_size
        if self.order is not None:
            found[self.order] = found.copy()
        return found.astype(np.int32)

    @property
    def values(self) -> NDArray[np.float32]:
        wide = [array.astype(np.float32)[:, self.index] for array in (self.zero, self.scale)]
        if self.offset is not None:
            return self.q.astype(np.float32) * wide[1] + self.offset.astype(np.float32)[:, self.index]
        return (self.q.astype(np.float32) - wide[0]) * wide[1]


@dataclass(frozen=True)
class Publication:
    """A folder, and what its quantized weights mean: by the names of their modules."""

    folder: Path
    records: Mapping[str, Record] = field(default_factory=dict)


def record(
    shape: tuple[int, int],
    seed: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    order: bool = False,
    offset: bool = False,
) -> Record:
    rng = np.random.default_rng(seed)
    rows, columns = shape
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    q = rng.integers(0, 1 << bits, shape, np.uint8)
    zero = rng.integers(1, 1 << bits, (rows, groups), np.uint8)
    if symmetric:
        zero[:] = 1 << (bits - 1)
    # Of both signs; exact in bf16 too.
    scale = (rng.integers(1, 255, (rows, groups)) * rng.choice((-1, 1), (rows, groups)) * 2.0**-13).astype(np.float16)
    channels = rng.permutation(columns) if order else None
    added = (rng.integers(-255, 256, (rows, groups)) * 2.0**-11).astype(np.float16) if offset else None
    return Record(q, zero, scale, bits, size, channels, added)


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "fc1.weight", "fc2.weight", "w1.weight", "w2.weight", "w3.weight"))


Draw = Callable[[str, tuple[int, int], int], Record]
Lay = Callable[[str, Record], Tensors]


def publish(
    checkpoint: Path,
    target: Path,
    lay: Lay,
    config: Mapping[str, Any],
    draw: Draw = lambda name, shape, seed: record(shape, seed),
    *,
    chosen: Callable[[str], bool] = is_linear,
) -> Publication:
    """The checkpoint with its linear layers, or the tensors `chosen` by their names, replaced by drawn records, laid by `lay`.

    config   further keys of config.json
    """
    target.mkdir()
    for name in TEXTS:
        if (checkpoint / name).exists():
            shutil.copy(checkpoint / name, target)
    tensors: Tensors = {}
    records: dict[str, Record] = {}
    for seed, (name, values) in enumerate(sorted(load_file(checkpoint / "model.safetensors").items())):
        if chosen(name):
            module = name.removesuffix(".weight")
            rows, columns = values.shape
            records[module] = draw(module, (rows, columns), seed)
            tensors |= lay(module, records[module])
        else:
            tensors[name] = values.float().numpy().astype(np.float16)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, target / "model.safetensors")
    keys = json.loads((checkpoint / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**keys, **config}))
    return Publication(target, records)


def awq(version: str = "gemm", **keys: Any) -> tuple[Lay, dict[str, Any]]:
    """AutoAWQ's layouts."""

    def lay(module: str, r: Record) -> Tensors:
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        if version == "gemm":
            found = (awq_gemm(r.q.T), awq_gemm(r.zero.T), r.scale.T)
        elif version == "gemv":
            words = {32: 4, 64: 2}.get(r.group_size, 1)
            missing = -r.zero.shape[1] % (8 * words)
            zero, scale = (np.pad(array, ((0, 0), (0, missing))) for array in (r.zero, r.scale))
            found = (stream(r.q, 4), stream(zero, 4), scale)
        else:
            words = {32: 4, 64: 2}.get(r.group_size, 1)
            missing = -r.zero.shape[1] % (8 * words)
            scaled = (-r.scale.astype(np.float32) * r.zero).astype(np.float16) if r.offset is None else r.offset
            scaled, scale = (np.pad(array, ((0, 0), (0, missing))).T for array in (scaled, r.scale))
            found = (awq_fast(r.q), scaled, scale)
        return dict(zip(names.values(), found, strict=True))

    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": version, **keys}
    return lay, {"quantization_config": settings}


def gptq(checkpoint_format: str = "gptq", bits: int = 4, **keys: Any) -> tuple[Lay, dict[str, Any]]:
    """GPTQ's layouts."""

    def lay(module: str, r: Record) -> Tensors:
        zero = r.zero if checkpoint_format != "gptq" else (r.zero - 1) & np.uint8((1 << r.bits) - 1)
        if checkpoint_format == "gptq_p":
            words, zeros = gptq_planar(r.q, r.bits), gptq_planar(zero.T, r.bits).T
        else:
            words, zeros = stream(r.q, r.bits).T, stream(zero.T, r.bits)
        return {
            f"{module}.qweight": words,
            f"{module}.qzeros": zeros,
            f"{module}.scales": r.scale.T,
            f"{module}.g_idx": r.index,
        }

    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "checkpoint_format": checkpoint_format}
    return lay, {"quantization_config": {**settings, **keys}}


def compressed(
    form: str = "pack-quantized",
    strategy: str = "group",
    *,
    dense: bool = True,
    packed_zeros: bool = True,
    symmetric: bool = False,
    group: Mapping[str, Any] | None = None,
    **keys: Any,
) -> tuple[Lay, dict[str, Any]]:
    """compressed-tensors; `dense`: a value may lie in two words; `group`: further keys of the one group."""

    def lay(module: str, r: Record) -> Tensors:
        def words(values: NDArray[np.uint8]) -> NDArray[np.int32]:
            return stream(values, r.bits) if dense else old_words(values, r.bits)

        center = np.int16(1 << (r.bits - 1))
        scale, zero = r.scale, r.zero
        if strategy == "tensor":
            scale, zero = scale[0, :1], zero[0, :1]
        if strategy == "block":
            scale, zero = scale[::BLOCK_ROWS], zero[::BLOCK_ROWS]
        found: Tensors = {f"{module}.weight_scale": scale}
        if form == "pack-quantized":
            found[f"{module}.weight_packed"] = words(r.q)
            found[f"{module}.weight_shape"] = np.array(r.q.shape)
        else:
            found[f"{module}.weight"] = (r.q.astype(np.int16) - center).astype(np.int8)
        if not symmetric:
            raw = form != "pack-quantized" or strategy in ("tensor", "block") or not packed_zeros
            signed = (zero.astype(np.int16) - center).astype(np.int8)
            found[f"{module}.weight_zero_point"] = signed if raw else np.ascontiguousarray(words(zero.T)).T
        if r.order is not None:
            found[f"{module}.weight_g_idx"] = r.index
        return found

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": 32, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, **(group or {})}}
    settings = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return lay, {"quantization_config": {**settings, "config_groups": groups, "ignore": ["lm_head"], **keys}}


def mlx(bits: int = 4, group_size: int = 32, **keys: Any) -> tuple[Lay, dict[str, Any]]:
    """MLX's affine layout; `keys`: further ones, and modules with settings of their own."""

    def lay(module: str, r: Record) -> Tensors:
        assert r.offset is not None
        words = stream(r.q, r.bits).view(np.uint32)
        return {f"{module}.weight": words, f"{module}.scales": r.scale, f"{module}.biases": r.offset}

    settings = {"group_size": group_size, "bits": bits, "mode": "affine", **keys}
    return lay, {"quantization": settings, "quantization_config": settings}


def in_bf16(publication: Publication, target: Path) -> Publication:
    """A copy of the folder with all floats in bf16, which holds those of a drawn record."""
    import torch
    from safetensors.torch import save_file as save

    shutil.copytree(publication.folder, target)
    tensors = load_file(target / "model.safetensors")
    halves = {name: each.bfloat16() if each.dtype == torch.float16 else each for name, each in tensors.items()}
    save(halves, target / "model.safetensors")
    return Publication(target, publication.records)


BLOCK_ROWS = 16
"""Rows that share a scale in the strategy block."""


def rewritten(publication: Publication, target: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> Path:
    """A copy of the folder whose tensors and configuration `change` has changed."""
    from safetensors.numpy import load_file as load

    shutil.copytree(publication.folder, target)
    tensors, config = load(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    change(tensors, config)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target
