"""A folder in compressed-tensors' pack-quantized, which vLLM and transformers read.

vLLM's kernels want groups of 32, 64, 128 or a row, one scheme for q, k and v and for gate and up, and zero points for four bits
alone; a negative scale there is untried, so a symmetric group with one is written from the other end of the range, which is
exact with a zero point: 15 - q, 15 - zero, -scale.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.converters.exporters.contents import (
    DTYPES,
    ExportedModel,
    ExportedWeight,
    TensorNames,
    check_network,
    exported,
    generation_settings,
)
from edgeq.converters.exporters.hf_config import hf_config
from edgeq.converters.exporters.safetensors_file import OutputTensor, write_safetensors
from edgeq.converters.families import EMBEDDING, HEAD, NORM
from edgeq.converters.importers.quantized.bit_stream import pack
from edgeq.errors import UnsupportedError
from edgeq.format.codec import AnyArray, ArrayF32, to_bf16
from edgeq.format.container import ModelFile

GROUPS = (0, 32, 64, 128)
ZERO_BITS = 4
SERVED_BITS = (4, 8)
"""Bits that every version of vLLM with this format serves."""
TABLES = ("lm_head", "model.embed_tokens")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Scheme:
    """How the integers of a matrix are written; `group_size` 0: a scale for each row."""

    bits: int
    group_size: int
    symmetric: bool

    @property
    def weights(self) -> dict[str, Any]:
        """As config.json has it; readers refuse any other key."""
        size = (
            {"strategy": "group", "group_size": self.group_size}
            if self.group_size
            else {"strategy": "channel", "group_size": None}
        )
        return {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, **size, "dynamic": False}


def write_compressed_tensors(file: ModelFile, folder: Path, on_progress: Progress) -> list[str]:
    """Write config.json, tokenizer and weights of `file` into the empty `folder`; returns lines for the user.

    UnsupportedError: what the format does not hold, by the name of the layer; nothing is written then.
    """
    check_network(file.metadata.config)
    keys, family = hf_config(file.metadata.config, file.metadata.generation)
    model = exported(file, TensorNames(family.layer_tensors, EMBEDDING, HEAD, NORM))
    schemes = {name: scheme for name, weight in model.weights.items() if (scheme := _scheme(name, weight)) is not None}
    _check_fused(model, schemes)
    tensors: dict[str, OutputTensor] = {}
    for name, weight in model.weights.items():
        tensors |= _packed(name, weight, schemes[name]) if name in schemes else _dense(name, weight)
        if (bias := weight.bias()) is not None:
            tensors[f"{name}.bias"] = OutputTensor(bias[0], bias[1].shape, lambda values=bias[1]: values)  # type: ignore[misc]
    for name, array in model.arrays.items():
        tensors[name] = OutputTensor(array.dtype, array.ref.shape, array.raw)
    settings = {**keys, "torch_dtype": "float16", "quantization_config": _settings(model, schemes)}
    _write_json(folder / "config.json", settings)
    _write_json(folder / "generation_config.json", generation_settings(file))
    _write_texts(file, folder)
    write_safetensors(folder / "model.safetensors", tensors, on_progress)
    return _notes(model, schemes)


def _scheme(name: str, weight: ExportedWeight) -> Scheme | None:
    """How a matrix is written; None: dense.  UnsupportedError: it cannot be."""
    codec = weight.codec
    if not codec.integer or name in TABLES:
        return None
    if codec.zero_kind == "half" or set(codec.parts(16, 32)) - {"q", "scale", "zero"}:
        raise UnsupportedError(
            f"{name}: {codec.name} has offsets, half a step or scales of scales, and compressed-tensors integer zero points"
        )
    if codec.group_size not in GROUPS or (codec.group_size and weight.columns % codec.group_size):
        raise UnsupportedError(
            f"{name}: groups of {codec.group_size} for {weight.columns} input channels; vLLM has groups of 32, 64 or 128 that "
            "divide them, or one per row: convert with --group-size 32"
        )
    symmetric = codec.symmetric and not (weight.integers()["scale"] < 0).any()
    if not symmetric and codec.bits != ZERO_BITS:
        what = "zero points" if not codec.symmetric else "negative scales"
        raise UnsupportedError(f"{name}: {what} at {codec.bits} bits; vLLM has them at {ZERO_BITS} bits alone")
    return Scheme(codec.bits, codec.group_size, symmetric)


def _check_fused(model: ExportedModel, schemes: dict[str, Scheme]) -> None:
    """UnsupportedError: matrices that vLLM computes as one are written in different ways."""
    for together in model.fused:
        found = {name: scheme for name in together if (scheme := schemes.get(name)) is not None}
        if any(not scheme.symmetric for scheme in found.values()):
            # A negative scale in one of them gives all of them zero points.
            for name, scheme in found.items():
                if scheme.bits == ZERO_BITS:
                    schemes[name] = replace(scheme, symmetric=False)
        if len({schemes.get(name) for name in together}) > 1:
            described = ", ".join(f"{name} {model.weights[name].codec.name}" for name in together)
            raise UnsupportedError(f"vLLM computes these as one matrix, and they have different codecs: {described}")


def _packed(name: str, weight: ExportedWeight, scheme: Scheme) -> dict[str, OutputTensor]:
    rows, columns = weight.shape
    groups = weight.codec.groups(columns)
    words = -(-columns * scheme.bits // 32)

    def arrays() -> tuple[AnyArray, AnyArray, AnyArray]:
        found = weight.integers()
        q, scale = found["q"], found["scale"]
        zero = found.get("zero", np.full(scale.shape, weight.codec.center, np.uint8))
        if not scheme.symmetric and weight.codec.symmetric:
            q, scale, zero = _positive(q, scale, zero, weight.codec.group_size)
        return q, scale, zero

    tensors = {
        f"{name}.weight_packed": OutputTensor("I32", (rows, words), lambda: pack(arrays()[0], scheme.bits)),
        f"{name}.weight_scale": OutputTensor("F16", (rows, groups), lambda: arrays()[1]),
        f"{name}.weight_shape": OutputTensor("I64", (2,), lambda: np.array([rows, columns])),
    }
    if not scheme.symmetric:
        shape = -(-rows * scheme.bits // 32), groups

        def zeros() -> AnyArray:
            return np.ascontiguousarray(pack(np.ascontiguousarray(arrays()[2].T), scheme.bits).T)

        tensors[f"{name}.weight_zero_point"] = OutputTensor("I32", shape, zeros)
    return tensors


def _positive(q: AnyArray, scale: AnyArray, zero: AnyArray, group_size: int) -> tuple[AnyArray, AnyArray, AnyArray]:
    """The same values with no negative scale, in four bits."""
    negative = scale < 0
    wide = np.repeat(negative, group_size or q.shape[1], axis=1)[:, : q.shape[1]]
    top = np.uint8((1 << ZERO_BITS) - 1)
    return np.where(wide, top - q, q), np.where(negative, -scale, scale), np.where(negative, top - zero, zero)


def _dense(name: str, weight: ExportedWeight) -> dict[str, OutputTensor]:
    """A matrix in 16 bits: as it is stored, or, of integers, rounded."""
    kind = DTYPES.get(weight.codec.kind, "F16")

    def values() -> AnyArray:
        found = weight.values()
        return to_bf16(found) if kind == "BF16" else found if kind == "F32" else _halves(found, name)

    return {f"{name}.weight": OutputTensor(kind, weight.shape, values)}


def _halves(values: ArrayF32, name: str) -> AnyArray:
    if np.abs(values).max(initial=0) >= 65520:
        raise UnsupportedError(f"{name} has a weight that is too large for f16")
    return values.astype(np.float16)


def _settings(model: ExportedModel, schemes: dict[str, Scheme]) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    members: dict[Scheme, list[str]] = defaultdict(list)
    for name, scheme in schemes.items():
        members[scheme].append(name)
    one = len(members) == 1
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if one else names,
            "weights": scheme.weights,
            "input_activations": None,
            "output_activations": None,
        }
        for i, (scheme, names) in enumerate(members.items())
    }
    dense = [name for name in model.weights if name not in schemes and name != "model.embed_tokens"]
    return {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"},
        "config_groups": groups,
        "ignore": sorted({*dense, "lm_head"}),
        "kv_cache_scheme": None,
    }


def _notes(model: ExportedModel, schemes: dict[str, Scheme]) -> list[str]:
    notes = [
        f"{name}: {model.weights[name].codec.name} written as f16, since vLLM has no quantized one"
        for name in TABLES
        if name in model.weights and model.weights[name].codec.integer
    ]
    rare = sorted({scheme.bits for scheme in schemes.values()} - set(SERVED_BITS))
    if rare:
        notes.append(f"weights of {', '.join(map(str, rare))} bits: vLLM serves them from the middle of 2026 on")
    return [*notes, _parallel(model, schemes)]


def _parallel(model: ExportedModel, schemes: dict[str, Scheme]) -> str:
    """On how many GPUs every matrix can be divided for vLLM's kernels: inputs in 128s and groups, outputs in 64s."""

    def divides(name: str, parts: int) -> bool:
        rows, columns = model.weights[name].shape
        across = name.endswith(("o_proj", "down_proj"))
        inputs, outputs = (parts, 1) if across else (1, parts)
        return not (rows % (64 * outputs) or columns % (128 * inputs) or columns % ((schemes[name].group_size or 1) * inputs))

    able = [parts for parts in (1, 2, 4, 8, 16) if all(divides(name, parts) for name in schemes)]
    if not able:
        return "vLLM's fastest kernels need inputs in multiples of 128 and outputs in multiples of 64, which this model has not"
    return f"vLLM can divide every layer over {able[-1]} GPU{'s' if able[-1] > 1 else ''} (--tensor-parallel-size)"


def _write_texts(file: ModelFile, folder: Path) -> None:
    """The tokenizer and the chat template."""
    generation = file.metadata.generation
    if (tokenizer := file.blob("tokenizer.json")) is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
    special = generation.get("special_tokens")
    # Of a token that there is not, too: transformers has one of its own for some kinds of models.
    named = special if isinstance(special, dict) else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    if generation.get("add_bos"):
        settings |= {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    _write_json(folder / "tokenizer_config.json", settings)
    if (template := file.blob("chat_template")) is not None:
        (folder / "chat_template.jinja").write_bytes(template)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
