"""A folder of weights that somebody else quantized, as a source of tensors with the names of floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from edgeq.converters.checkpoint.source import StoredTensor
from edgeq.converters.importers.quantized.awq import awq_weights
from edgeq.converters.importers.quantized.compressed import compressed_weights
from edgeq.converters.importers.quantized.gptq import gptq_weights
from edgeq.converters.importers.quantized.mlx import mlx_weights
from edgeq.converters.importers.quantized.mxfp4 import mxfp4_weights
from edgeq.converters.importers.quantized.packed_tensor import PackedTensor, PackedWeights, Shards
from edgeq.converters.importers.quantized.settings import QuantizationSettings
from edgeq.converters.importers.safetensors_folder import SafetensorsFolder
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.format.safetensors import read_json

MLX_KEY = "quantization"
"""MLX's key of config.json; MLX repeats it as quantization_config, where it names no method."""
KEYS = ("quantization_config", "compression_config", MLX_KEY)
"""Keys of config.json that say how weights are quantized."""
FILES = ("quantize_config.json", "quant_config.json")
"""Files that older writers put it into: of GPTQ, of AWQ."""
FORMATS: dict[str, Callable[[Shards, QuantizationSettings], PackedWeights]] = {
    "awq": awq_weights,
    "gptq": gptq_weights,
    "compressed-tensors": compressed_weights,
    "mlx": mlx_weights,
    "mxfp4": mxfp4_weights,
}
"""Format as configurations name it -> what reads it."""
LONE = (".scales", ".biases", ".qzeros", ".g_idx", ".weight_scale")
"""Ends of the names of tensors that mean nothing without integers."""


@dataclass
class QuantizedFolder:
    """A folder of safetensors whose weights are integers; `folder` reads them as they lie.

    notes   what the user should know of how they were read, when the tensors are
    """

    folder: SafetensorsFolder
    format: str
    settings: QuantizationSettings
    notes: tuple[str, ...] = ()
    quantized: ClassVar[bool] = True
    texts_complete: ClassVar[bool] = False

    @classmethod
    def of(cls, folder: SafetensorsFolder) -> QuantizedFolder | None:
        """The same folder as one of quantized weights; None: its configuration says nothing of any.

        UnsupportedError: a format that is not supported, by its name.
        """
        settings = _settings(folder)
        return None if settings is None else cls(folder, _format(settings), settings)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def place(self) -> str:
        return self.folder.place

    @property
    def origin(self) -> Mapping[str, object]:
        return {"format": self.format}

    @property
    def config(self) -> Mapping[str, Any]:
        return _plain(self.folder.config)

    @property
    def texts(self) -> Path:
        return self.folder.texts

    def files(self) -> list[Path]:
        return self.folder.files()

    def tensors(self) -> Mapping[str, StoredTensor]:
        """As `SafetensorsFolder.tensors`; a quantized weight has the name that it would have in floats.

        UnsupportedError: a layout, or an order of channels, that is not supported.
        """
        shards = self.folder.tensors()
        try:
            found = FORMATS[self.format](shards, self.settings)
        except CheckpointError as error:
            raise CheckpointError(f"{self.place}: {error}") from None
        weights, self.notes = found.weights, found.notes
        if not weights and not found.tensors and self.settings.values.get("format") != "dense":
            raise CheckpointError(
                f"{self.place}: {self.settings.place}: the checkpoint is already quantized ({self.format}), and none of its "
                "tensors is; download it again"
            )
        tensors: dict[str, StoredTensor] = {name: tensor for name, tensor in shards.items() if name not in found.parts}
        twice = sorted(tensors.keys() & found.tensors)
        if twice:
            raise CheckpointError(f"{self.place}: has both {twice[0]} and its integers; one of them is too many")
        tensors |= found.tensors
        lone = next((name for name in sorted(tensors) if name.endswith(LONE)), None)
        if lone is not None:
            raise UnsupportedError(f"{self.place}: tensor {lone} belongs to no quantized weight; such layers are not supported")
        if "lm_head" in weights and self.config.get("tie_word_embeddings"):
            raise UnsupportedError(
                f"{self.place}: the head has integers of its own, and config.json says that it is the embedding "
                "(tie_word_embeddings); such checkpoints are not supported"
            )
        for module, weight in weights.items():
            if f"{module}.weight" in tensors:
                raise CheckpointError(f"{self.place}: has both {module}.weight and its integers; one of them is too many")
            tensor = PackedTensor(f"{module}.weight", weight)
            tensor.codec  # noqa: B018  refuses a size of groups
            tensors[f"{module}.weight"] = tensor
        return tensors


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what says how weights are quantized, that of a decoder beside a tower too."""
    found = {key: value for key, value in config.items() if key not in KEYS}
    nested = found.get("text_config")
    return found | ({"text_config": _plain(nested)} if isinstance(nested, dict) else {})


def _settings(folder: SafetensorsFolder) -> QuantizationSettings | None:
    """What says how the weights of a folder are quantized: in config.json, or a file of its own."""
    nested = folder.config.get("text_config")
    for place, config in (("", folder.config), ("text_config: ", nested if isinstance(nested, dict) else {})):
        found = {key: value for key in KEYS if isinstance(value := config.get(key), dict)}
        mlx, named = found.get(MLX_KEY, {}), any(each.get("quant_method") for each in found.values())
        if {"bits", "group_size"} <= set(mlx) and not named:
            return QuantizationSettings({"quant_method": "mlx", **mlx}, f"config.json: {place}{MLX_KEY}")
        if found:
            key, first = next(iter(found.items()))
            return QuantizationSettings(first, f"config.json: {place}{key}")
    for name in FILES:
        if (path := folder.folder / name).exists():
            return QuantizationSettings({"quant_method": "awq" if "quant_" in name else "gptq", **read_json(path)}, name)
    return None


def _format(settings: QuantizationSettings) -> str:
    """The format that a configuration names.  UnsupportedError: it is not supported."""
    named = settings.text("quant_method", "method", default="")
    if named in FORMATS:
        return named
    raise UnsupportedError(
        f"{settings.place}: the checkpoint is already quantized ({named or 'method not named'}); supported: "
        f"{', '.join(FORMATS)}; convert the original checkpoint instead"
    )
