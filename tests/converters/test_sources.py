"""Checkpoints that are not folders of safetensors: tensors in memory, and weights that were quantized before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from edgeq.converters.checkpoint.checkpoint import Checkpoint
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.checkpoint.slabs import RowReader, Tensors
from edgeq.converters.checkpoint.source import CheckpointSource, StoredTensor
from edgeq.converters.convert import carry_out
from edgeq.converters.importers import open_source
from edgeq.converters.method import Method, Study
from edgeq.converters.methods import METHODS
from edgeq.converters.planning import method_options
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import planned
from edgeq.converters.rounding.linears import Delivery, LinearItem, Recipe
from edgeq.converters.rounding.quantizer import Quantized
from edgeq.converters.running.readback import stored_tensors
from edgeq.errors import CheckpointError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
CODEC = Codec("int", 4, 32, symmetric=False)


def silent(done: float, total: float, label: str) -> None:
    pass


@dataclass
class ArrayTensor:
    values: torch.Tensor
    codec: Codec | None = None

    @property
    def dtype(self) -> str:
        return DTYPES[self.values.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape,)

    def read(self, first: int, count: int, name: str) -> NDArray[np.float32]:
        return self.values.flatten()[first : first + count].float().numpy()


class IntegerTensor(ArrayTensor):
    """A weight as somebody rounded it; `values` are the products of integers and scales."""

    def __init__(self, columns: int, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        groups = columns // CODEC.group_size
        # The ends of the range are not used: rounding the products again would give other integers.
        q = torch.randint(2, 13, (rows, columns), generator=generator, dtype=torch.uint8)
        scale = (torch.rand(rows, groups, generator=generator) * 0.01 + 0.001).half()
        zero = torch.randint(5, 10, (rows, groups), generator=generator, dtype=torch.uint8)
        wide = [x.float().repeat_interleave(CODEC.group_size, 1) for x in (scale, zero)]
        super().__init__((q.float() - wide[1]) * wide[0], CODEC)
        self.integers = Quantized(q, scale, zero)


@dataclass(frozen=True)
class MemorySource:
    name: str
    config: dict[str, Any]
    texts: Path
    arrays: Mapping[str, StoredTensor]
    place: str = "memory"

    def tensors(self) -> Mapping[str, StoredTensor]:
        return self.arrays

    def files(self) -> list[Path]:
        return []


def in_memory(folder: Path, texts: Path) -> MemorySource:
    """The checkpoint in `folder` without its files: only those of its tokenizer are in `texts`."""
    texts.mkdir()
    for name in TEXTS:
        if (folder / name).exists():
            shutil.copy(folder / name, texts)
    arrays = {name: ArrayTensor(values) for name, values in load_file(folder / "model.safetensors").items()}
    return MemorySource(folder.name, json.loads((folder / "config.json").read_text()), texts, arrays)


def converted(source: CheckpointSource, output: Path, **options: Any) -> ModelFile:
    return carry_out(planned(source, ConvertOptions(**options)), output, silent).file


# phi3 has fused matrices, gemma3 gains less one and two kinds of layers, opt vectors that are rows of a table.
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama_gqa", {"method": "awq+gptq", "calibration_rows": 4, "calibration_length": 32}),
        ("phi3", {"method": "rtn"}),
        ("gemma3", {"method": "none"}),
        ("opt", {"method": "gptq", "calibration_rows": 4, "calibration_length": 32}),
    ],
    ids=lambda x: x if isinstance(x, str) else x["method"],
)
def test_tensors_in_memory_convert_to_the_bytes_of_their_folder(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    folder = checkpoint(family)
    expected = converted(open_source(str(folder), HubAccess()), tmp_path / "folder.edgeq", **options)
    found = converted(in_memory(folder, tmp_path / "texts"), tmp_path / "memory.edgeq", **options)
    assert found.path.read_bytes() == expected.path.read_bytes()


def test_messages_name_the_place_of_the_source(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = in_memory(checkpoint("llama_gqa"), tmp_path / "texts")
    arrays = {name: tensor for name, tensor in source.arrays.items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"^memory: tensor model\.norm\.weight is missing"):
        planned(MemorySource(source.name, source.config, source.texts, arrays), ConvertOptions())


class AsStored(Method):
    """Keeps what a source brings in integers."""

    name = "as-stored"

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        return Recipe(stored)

    def tensors(self, source: Tensors, study: Study) -> Tensors:
        assert isinstance(source, Checkpoint)
        self._source = source
        return source

    def deliver(self, item: LinearItem, read: RowReader) -> Delivery:
        tensors = [self._source.tensors[name].stored for name, _ in item.tensors]
        integers = [tensor.integers for tensor in tensors if isinstance(tensor, IntegerTensor)]
        if len(integers) < len(tensors):
            return Delivery(read)
        joined = (torch.cat(arrays) for arrays in zip(*((x.q, x.scale, x.zero) for x in integers), strict=True))
        return Delivery(read, (Quantized(*joined),))


@pytest.fixture
def quantized(checkpoint: Callable[..., Path], tmp_path: Path) -> MemorySource:
    """A checkpoint whose MLPs were quantized before it came here."""
    source = in_memory(checkpoint("llama_gqa"), tmp_path / "texts")
    arrays = dict(source.arrays)
    for seed, (name, tensor) in enumerate(source.arrays.items()):
        if ".mlp." in name:
            rows, columns = tensor.shape
            arrays[name] = IntegerTensor(columns, rows, seed)
    return MemorySource(source.name, source.config, source.texts, arrays)


def test_a_method_can_keep_the_integers_of_a_source(
    quantized: MemorySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "as-stored", AsStored)
    monkeypatch.setitem(method_options.DEFAULTS, "as-stored", {"kv_bits": None})  # type: ignore[index]
    plan = planned(quantized, ConvertOptions(method="as-stored"))
    file = carry_out(plan, tmp_path / "kept.edgeq", silent).file
    codecs = {name: linear.weights[0].codec for name, linear in file.metadata.linears.items()}
    assert {codecs["layers.0.gate_up"], codecs["layers.1.down"]} == {CODEC} and codecs["layers.0.qkv"].kind != "int"
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    for name, tensor in quantized.arrays.items():
        if isinstance(tensor, IntegerTensor):
            assert np.array_equal(read(name), tensor.values.numpy()), name


def test_without_quantization_the_integers_of_a_source_become_the_floats_that_they_mean(
    quantized: MemorySource, tmp_path: Path
) -> None:
    plan = planned(quantized, ConvertOptions(method="none"))
    file = carry_out(plan, tmp_path / "floats.edgeq", silent).file
    assert file.metadata.linears["layers.0.down"].weights[0].codec == Codec("f32")
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    name = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(read(name), quantized.arrays[name].read(0, 1 << 20, name).reshape(read(name).shape))
