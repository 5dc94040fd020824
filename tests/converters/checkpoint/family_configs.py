"""Configurations of families, and checkpoints of them, for the tests of this room."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import convert
from edgeq.converters.families import Family, recognise
from edgeq.converters.importers import open_source
from edgeq.converters.planning.options import ConvertOptions
from edgeq.network.config import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def config_of(architecture: str, **keys: Any) -> ModelConfig:
    return recognise({"architectures": [architecture], **SIZES, **keys})[1]


def opened(folder: Path) -> tuple[Checkpoint, Family, ModelConfig]:
    source = Checkpoint(open_source(str(folder), HubAccess()))
    family, config = recognise(source.config)
    source.rename(family.description.renamed)
    source.arrange(family.sources())
    return source, family, config


def saved_otherwise(folder: Path, other: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    shutil.copytree(folder, other)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(config))


def assert_same_file(first: Path, second: Path, folder: Path) -> None:
    """The integers that rounding makes of both checkpoints, and their arrays."""
    options = ConvertOptions(method="rtn", group_size=32)
    one, two = (convert(str(each), folder / f"{each.name}.edgeq", options, lambda *_: None) for each in (first, second))
    assert one.metadata.config == two.metadata.config and one.metadata.arrays.keys() == two.metadata.arrays.keys()
    for name, array in one.metadata.arrays.items():
        assert np.array_equal(one.array(array), two.array(two.metadata.arrays[name])), name
    for name, linear in one.metadata.linears.items():
        arrays = linear.weights[0].arrays, two.metadata.linears[name].weights[0].arrays
        for part in arrays[0]:
            assert np.array_equal(one.array(arrays[0][part]), two.array(arrays[1][part])), (name, part)
