"""Checkpoints that are not folders of safetensors: tensors in memory, and weights that were quantized before."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from edgeq.converters.checkpoint.checkpoint import Checkpoint, TensorSource
from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.checkpoint.source import CheckpointSource, StoredArrays, StoredTensor
from edgeq.converters.convert import carry_out
from edgeq.converters.importers import open_source
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.planning.preflight import planned
from edgeq.converters.rounding.quantizer import Quantized
from edgeq.converters.running.readback import stored_tensors
from edgeq.errors import CheckpointError
from edgeq.format.adapter import Factors
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.runtime.model import Model

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
CODEC = Codec("int", 4, 32, symmetric=False)


def silent(done: float, total: float, label: str) -> None:
    pass


@dataclass
class ArrayTensor:
    values: torch.Tensor
    codec: Codec | None = None
    order: ClassVar[None] = None

    @property
    def dtype(self) -> str:
        return DTYPES[self.values.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape,)

    def read(self, first: int, count: int, name: str) -> NDArray[np.float32]:
        return self.values.flatten()[first : first + count].float().numpy()

    def quantized(self, first: int, count: int, name: str) -> StoredArrays:
        raise AssertionError(f"{name} has no integers")


class IntegerTensor(ArrayTensor):
    """A weight as somebody rounded it; `values` are the products of integers and scales."""

    def __init__(self, columns: int, rows: int, seed: int, codec: Codec = CODEC) -> None:
        generator = torch.Generator().manual_seed(seed)
        groups = columns // codec.group_size
        # The ends of the range are not used: rounding the products again would give other integers.
        q = torch.randint(2, 13, (rows, columns), generator=generator, dtype=torch.uint8)
        # Scales of both signs: formats exist that take the sign of a group's largest weight.
        scale = ((torch.rand(rows, groups, generator=generator) - 0.5) * 0.02).half()
        zero = torch.randint(5, 10, (rows, groups), generator=generator, dtype=torch.uint8)
        if codec.symmetric:
            zero.fill_(codec.center)
        wide = [x.float().repeat_interleave(codec.group_size, 1) for x in (scale, zero)]
        super().__init__((q.float() - wide[1]) * wide[0], codec)
        self._integers = Quantized(q, scale, None if codec.symmetric else zero)

    def quantized(self, first: int, count: int, name: str) -> StoredArrays:
        return {part: array[first : first + count] for part, array in self._integers.arrays.items()}


@dataclass(frozen=True)
class MemorySource:
    name: str
    config: dict[str, Any]
    texts: Path
    arrays: Mapping[str, StoredTensor]
    place: str = "memory"
    notes: tuple[str, ...] = ()
    texts_complete: bool = False
    origin: Mapping[str, object] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        return any(tensor.codec for tensor in self.arrays.values())

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


def test_integers_of_a_source_are_kept_unless_something_else_is_asked(quantized: MemorySource, tmp_path: Path) -> None:
    plan = planned(quantized, ConvertOptions())
    assert plan.method.name == "as-stored" and not plan.notes()
    file = carry_out(plan, tmp_path / "kept.edgeq", silent).file
    codecs = {name: linear.weights[0].codec for name, linear in file.metadata.linears.items()}
    assert {codecs["layers.0.gate_up"], codecs["layers.1.down"]} == {CODEC}
    assert codecs["layers.0.qkv"].kind == codecs["head"].kind == "bf16"
    assert means_the_same(plan, file, quantized)
    again = planned(quantized, ConvertOptions(bits=4))
    assert again.method.name == "rtn"
    assert any("quantized already: --method rtn rounds it a second time" in line for line in again.notes())
    assert planned(quantized, ConvertOptions(method="none")).notes() == []


@pytest.mark.exhaustive
def test_rows_in_other_codecs_are_stored_apart(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    # Of layer 0 one part of qkv and one of gate_up are in another codec than the rest.
    source = in_memory(checkpoint("llama_gqa"), tmp_path / "texts")
    other, eight = Codec("int", 5, 16), Codec("int", 8, 32)
    arrays = dict(source.arrays) | {"lm_head.weight": source.arrays["model.embed_tokens.weight"]}
    for seed, (name, tensor) in enumerate(list(arrays.items())):
        if len(tensor.shape) == 2:
            mixed = name in ("model.layers.0.self_attn.v_proj.weight", "model.layers.0.mlp.gate_proj.weight")
            codec = other if mixed else eight if name.startswith(("lm_head", "model.embed")) else CODEC
            arrays[name] = IntegerTensor(tensor.shape[1], tensor.shape[0], seed, codec)
    source = MemorySource(source.name, source.config | {"tie_word_embeddings": False}, source.texts, arrays)
    plan = planned(source, ConvertOptions(method="as-stored"))
    file = carry_out(plan, tmp_path / "kept.edgeq", silent).file
    codecs = {name: linear.weights[0].codec for name, linear in file.metadata.linears.items()}
    assert {codecs[f"layers.0.{part}"] for part in ("v", "gate")} == {other}
    assert {codecs[f"layers.0.{part}"] for part in ("q", "k", "up", "o", "down")} == {CODEC}
    assert codecs["layers.1.qkv"] == codecs["layers.1.gate_up"] == CODEC
    assert codecs["head"] == codecs["embedding"] == eight
    assert means_the_same(plan, file, source)
    with Model.load(file.path, target="reference", threads=1) as reference, Model.load(file.path, threads=1) as cpu:
        tokens = [1, 5, 9, 2]
        wanted, found = reference.session().prefill(tokens), cpu.session().prefill(tokens)
        assert np.abs(wanted - found).max() < 1e-3


def means_the_same(plan: ConversionPlan, file: ModelFile, source: MemorySource) -> bool:
    """Whether what is read back of a file is what the tensors of its source mean, bit for bit."""
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    count = {name: math.prod(tensor.shape) for name, tensor in source.arrays.items()}
    return all(
        np.array_equal(read(name), tensor.read(0, count[name], name).reshape(tensor.shape))
        for name, tensor in source.arrays.items()
    )


def test_without_quantization_the_integers_of_a_source_become_the_floats_that_they_mean(
    quantized: MemorySource, tmp_path: Path
) -> None:
    plan = planned(quantized, ConvertOptions(method="none"))
    file = carry_out(plan, tmp_path / "floats.edgeq", silent).file
    assert file.metadata.linears["layers.0.down"].weights[0].codec == Codec("f32")
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    name = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(read(name), quantized.arrays[name].read(0, 1 << 20, name).reshape(read(name).shape))


def stacked(tensors: Mapping[str, StoredTensor], tmp_path: Path) -> Checkpoint:
    """`whole` is made of q, k and v, one below the other, or where there is one of `fused`."""
    checkpoint = Checkpoint(MemorySource("m", {}, tmp_path, tensors))
    shapes = {name: tensor.shape for name, tensor in tensors.items() if name in "qkv"}
    rows = sum(shape[0] for shape in shapes.values())
    parts = tuple(TensorSource(name, shape, shape) for name, shape in shapes.items())
    otherwise = TensorSource("", (), (rows, 64), parts=parts)
    checkpoint.arrange({"whole": TensorSource("fused", (rows, 64), (rows, 64), otherwise=otherwise)})
    assert set(checkpoint.tensors) == {"whole", *(name for name in tensors if name not in ("q", "k", "v", "fused"))}
    return checkpoint


def test_matrices_one_below_the_other_keep_their_integers(tmp_path: Path) -> None:
    tensors = {name: IntegerTensor(64, rows, rows) for name, rows in (("q", 8), ("k", 5), ("v", 11))}
    checkpoint = stacked(tensors, tmp_path)
    assert checkpoint.codec("whole") == CODEC and checkpoint.order("whole") is None and checkpoint.rearranged
    values = torch.cat([each.values for each in tensors.values()]).numpy()
    for start, stop in ((0, 24), (6, 9), (8, 13), (13, 24), (7, 14), (5, 5)):
        assert np.array_equal(checkpoint.rows("whole", start, stop), values[start:stop])
        found = checkpoint.quantized("whole", start, stop)
        wanted = {part: np.concatenate([each.quantized(0, 11, "")[part] for each in tensors.values()]) for part in found}
        assert all(np.array_equal(found[part], wanted[part][start:stop]) for part in wanted), (start, stop)


def test_matrices_that_are_stored_differently_become_floats(tmp_path: Path) -> None:
    tensors: dict[str, StoredTensor] = {"q": IntegerTensor(64, 8, 1), "k": IntegerTensor(64, 8, 2, Codec("int", 4, 32))}
    checkpoint = stacked(tensors, tmp_path)
    assert checkpoint.codec("whole") == Codec("f32")
    halves = stacked({"q": ArrayTensor(torch.ones(2, 64).half()), "k": ArrayTensor(torch.ones(3, 64).bfloat16())}, tmp_path)
    assert halves.codec("whole") == Codec("f32")


def test_an_adapter_is_merged_into_the_matrix_that_it_is_for(tmp_path: Path) -> None:
    tensors = {name: ArrayTensor(torch.ones(3, 64)) for name in "qkv"}
    checkpoint = Checkpoint(MemorySource("m", {}, tmp_path, tensors))
    factors = Factors(np.ones((2, 64), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2))
    checkpoint.tensors["k"] = replace(checkpoint.tensors["k"], merged=(factors, 0))
    parts = tuple(TensorSource(name, (3, 64), (3, 64)) for name in "qkv")
    checkpoint.arrange({"whole": TensorSource("", (), (9, 64), parts=parts)})
    assert checkpoint.codec("whole") == Codec("f32")
    assert checkpoint.rows("whole", 2, 8)[:, 0].tolist() == [1, 2, 6, 10, 1, 1]


@pytest.mark.parametrize(("rows", "taken"), [(24, "fused"), (23, "q")])
def test_a_tensor_is_taken_where_the_checkpoint_has_it_in_that_shape(tmp_path: Path, rows: int, taken: str) -> None:
    checkpoint = Checkpoint(
        MemorySource("m", {}, tmp_path, {"fused": ArrayTensor(torch.ones(rows, 64)), "q": ArrayTensor(torch.ones(24, 64))})
    )
    otherwise = TensorSource("q", (24, 64), (24, 64))
    checkpoint.arrange({"whole": TensorSource("fused", (24, 64), (24, 64), otherwise=otherwise)})
    # What is not taken is left over, which `open_tensors` refuses.
    assert checkpoint.tensors["whole"].name == taken and set(checkpoint.tensors) == {"whole", "fused", "q"} - {taken}
