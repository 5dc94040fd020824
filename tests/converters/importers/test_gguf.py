"""GGUF files: what their tensors and metadata mean, what of them is kept, and what is refused."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.convert import carry_out
from edgeq.converters.importers import open_source
from edgeq.converters.importers.gguf_tensors import GgufTensor
from edgeq.converters.importers.gguf_types import BLOCK_TYPES
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.preflight import planned
from edgeq.converters.running.readback import stored_tensors
from edgeq.errors import CheckpointError, EdgeqError, UnsupportedError
from edgeq.format.codec import Codec, dequantized
from edgeq.runtime.model import Model
from tests.converters.importers.conversions import silent
from tests.converters.importers.gguf_files import in_type, random_blocks, write_gguf

# The tokenizer is not what these tests are about.
pytestmark = pytest.mark.usefixtures("tiny_tokenizer")
EIGHT_THOUSAND = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
EIGHT_THOUSAND |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_mha": {},
    "llama_gqa": {},
    "llama3_rope": {"rope_parameters": EIGHT_THOUSAND},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"sliding_window": 24},
    "phi3_longrope": {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0}
        | {"short_factor": [1 + 0.25 * i for i in range(16)], "long_factor": [1.5 + i for i in range(16)]}
    },
    "gemma3": {"sliding_window": 24, "num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 64},
    "smollm3": {"use_sliding_window": False, "num_hidden_layers": 5, "no_rope_layers": None},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
}


@pytest.mark.parametrize("number", BLOCK_TYPES, ids=lambda number: BLOCK_TYPES[number].name)
def test_blocks_mean_what_the_package_gguf_says(number: int, tmp_path: Path) -> None:
    rows, blocks, block = 48, 3, BLOCK_TYPES[number]
    raw = random_blocks(number, rows, blocks)
    (tmp_path / "data").write_bytes(b"before" + raw.tobytes())
    expected = gguf.dequantize(raw.reshape(rows, -1), Type(number))
    assert block.name == Type(number).name and (block.width, block.nbytes) == gguf.GGML_QUANT_SIZES[Type(number)]
    tensor = GgufTensor(tmp_path / "data", expected.shape, number, len(b"before"))
    assert np.array_equal(tensor.read(0, expected.size, "t"), expected.reshape(-1))
    # Any range of values, too.
    assert np.array_equal(tensor.read(1000, 77, "t"), expected.reshape(-1)[1000:1077])
    arrays = {name: array[16:] for name, array in tensor.quantized(0, rows, "t").items()}
    parts = block.codec.parts(rows, expected.shape[1])
    assert {name: array.dtype for name, array in arrays.items()} == {name: part.dtype for name, part in parts.items()}
    assert all(np.array_equal(arrays[name], array) for name, array in tensor.quantized(16, rows - 16, "t").items())
    assert np.array_equal(dequantized(block.codec, expected.shape[1], arrays), expected[16:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_floats_is_the_checkpoint_that_it_was_made_of(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    folder = checkpoint(family, **FAMILIES[family])
    write_gguf(folder, tmp_path / "m.gguf")
    options = ConvertOptions(method="none")
    wanted, found = (planned(open_source(str(place), HubAccess()), options) for place in (folder, tmp_path / "m.gguf"))
    assert found.method.config == wanted.method.config
    shapes = wanted.method.family.tensor_shapes()
    assert shapes == found.method.family.tensor_shapes()
    for name, shape in shapes.items():
        values = (plan.checkpoint.rows(name, 0, shape[0]) for plan in (wanted, found))
        assert np.array_equal(*values), name
    # Ranges that begin and end inside a head.
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(wanted.checkpoint.rows(name, 5, 41), found.checkpoint.rows(name, 5, 41))


def test_a_fourth_value_of_a_ternary_weight_is_refused(tmp_path: Path) -> None:
    """Two bits hold it, and llama.cpp would take it for 2."""
    raw = random_blocks(35, 4, 3)
    tensor = GgufTensor(tmp_path / "data", (4, 768), 35, 0)
    for value in (2, 3):
        raw[2, 1, 17] = raw[2, 1, 17] & 0xF3 | value << 2
        (tmp_path / "data").write_bytes(raw.tobytes())
        if value == 2:
            assert np.isfinite(tensor.read(0, 4 * 768, "t")).all() and tensor.quantized(0, 4, "t")["q"].max() == 3
    with pytest.raises(CheckpointError, match=r"t has a scale .* or as TQ2_0 a weight that is none of three; it is damaged"):
        tensor.quantized(0, 4, "t")
    assert tensor.quantized(0, 2, "t")["q"].min() == 1
    # A method that rounds again looks for it in the values.
    assert np.isnan(tensor.read(2 * 768 + 256, 256, "t")).any()


EXACT = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4]
REARRANGED = ("llama_mha", "phi3", "qwen3_moe")
"""Families whose rows lie otherwise in a GGUF file, each in a way of its own."""


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, family, marks=() if i % 3 == j else pytest.mark.exhaustive, id=f"{family}-{kind.name}")
        for i, kind in enumerate(EXACT)
        for j, family in enumerate(REARRANGED)
    ],
)
def test_integers_are_kept_bit_for_bit(checkpoint: Callable[..., Path], tmp_path: Path, kind: Type, family: str) -> None:
    folder = checkpoint(family)
    path = tmp_path / "m.gguf"
    write_gguf(folder, path, in_type(kind))
    source = open_source(str(path), HubAccess())
    plan = planned(source, ConvertOptions())
    assert plan.method.name == "as-stored" and source.quantized
    file = carry_out(plan, tmp_path / "m.edgeq", silent).file
    codec = BLOCK_TYPES[int(kind)].codec
    codecs = {linear.weights[0].codec for name, linear in file.metadata.linears.items() if "router" not in name}
    assert codecs == {codec}
    origin = file.metadata.provenance["origin"]
    assert isinstance(origin, dict) and origin["format"] == "gguf" and kind.name in origin["types"]
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    # The same rounding on the same rows of the checkpoint, in its own order: blocks lie in rows.
    floats = planned(open_source(str(folder), HubAccess()), ConvertOptions(method="none")).checkpoint
    for name, shape in plan.method.family.tensor_shapes().items():
        values = floats.rows(name, 0, shape[0])
        if values.ndim > 1 and not name.endswith("mlp.gate.weight"):
            values = gguf.dequantize(gguf.quantize(values, kind), kind)
        assert np.array_equal(read(name), values), name


K_QUANTS = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K]
UNWRITTEN = [*K_QUANTS, Type.IQ4_NL]
"""Types that the package reads and does not write."""
TERNARY = [Type.TQ1_0, Type.TQ2_0]
WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Rows of whole blocks of 256 weights."""


PAIR = ("llama_gqa", "qwen3_moe")


def q4_k_m(name: str, values: np.ndarray[Any, Any]) -> Type:
    """Types in a mixture, as llama.cpp makes one: some matrices, and the head, have more bits."""
    more = name.startswith(("token_embd", "blk.1.attn_v", "blk.1.ffn_down"))
    return in_type(Type.Q6_K if more else Type.Q4_K)(name, values)


@pytest.mark.parametrize(
    ("choose", "family"),
    [
        *(
            pytest.param(in_type(kind), family, marks=() if i % 2 == j else pytest.mark.exhaustive, id=f"{family}-{kind.name}")
            for i, kind in enumerate(UNWRITTEN)
            for j, family in enumerate(PAIR)
        ),
        *(pytest.param(q4_k_m, family, id=f"{family}-Q4_K_M") for family in PAIR),
        *(pytest.param(in_type(kind), "llama_gqa", id=f"llama_gqa-{kind.name}") for kind in TERNARY),
    ],
)
def test_types_of_256_weights_are_kept_bit_for_bit(
    checkpoint: Callable[..., Path], tmp_path: Path, choose: Callable[[str, Any], Type], family: str
) -> None:
    path = tmp_path / "m.gguf"
    experts = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    write_gguf(checkpoint(family, **WIDE, **experts), path, choose)
    plan = planned(open_source(str(path), HubAccess()), ConvertOptions())
    file = carry_out(plan, tmp_path / "m.edgeq", silent).file
    read = stored_tensors(file.path, file.segments, [item for step in plan.steps for item in step.items])
    compared = Counter[str]()
    for tensor in gguf.GGUFReader(path).tensors:
        if int(tensor.tensor_type) not in BLOCK_TYPES:
            continue
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        if family == "llama_gqa" and ("attn_q" in tensor.name or "attn_k" in tensor.name):
            expected = expected.reshape(-1, 32, 2, 256).swapaxes(1, 2).reshape(expected.shape)
        for name, values in under_our_names(tensor.name, expected):
            # Bits, so that the signs of zeros count.
            assert np.array_equal(read(name).view(np.uint32), np.ascontiguousarray(values).view(np.uint32)), name
            compared[tensor.tensor_type.name] += 1
    matrices = 1 + 2 * 7 if family == "llama_gqa" else 2 + 2 * (4 + 3 * 8)
    assert compared.total() == matrices and (choose is not q4_k_m or compared["Q6_K"] > 2)
    stored = {linear.weights[0].codec for name, linear in file.metadata.linears.items() if "router" not in name}
    assert stored == {BLOCK_TYPES[int(Type[name])].codec for name in compared}


def under_our_names(name: str, values: np.ndarray[Any, Any]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """A tensor of a file as the checkpoint has it, experts one by one."""
    ends = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    if name in ends:
        return [(ends[name], values)]
    _, layer, module, _ = name.split(".")
    modules = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    modules |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    modules |= {"ffn_down": "mlp.down_proj"}
    if values.ndim == 2:
        return [(f"model.layers.{layer}.{modules[module]}.weight", values)]
    last = modules[module.removesuffix("_exps")].removeprefix("mlp.")
    return [(f"model.layers.{layer}.mlp.experts.{i}.{last}.weight", each) for i, each in enumerate(values)]


@pytest.mark.parametrize("kind", [Type.Q4_K, pytest.param(Type.Q6_K, marks=pytest.mark.exhaustive)], ids=lambda kind: kind.name)
def test_k_quants_run_with_their_embedding(checkpoint: Callable[..., Path], tmp_path: Path, kind: Type) -> None:
    """The embedding is looked up in the codec of the head, which it is."""
    write_gguf(checkpoint("llama_gqa", **WIDE), tmp_path / "m.gguf", in_type(kind))
    files = []
    for method in ("as-stored", "none"):
        plan = planned(open_source(str(tmp_path / "m.gguf"), HubAccess()), ConvertOptions(method=method))
        files.append(carry_out(plan, tmp_path / f"{method}.edgeq", silent).file)
    kept, floats = files
    assert kept.metadata.config.tie_word_embeddings and "embedding" not in kept.metadata.arrays
    tokens = [1, 5, 9, 2, 30, 2047]
    with Model.load(floats.path, target="reference", threads=1) as model:
        expected = model.session().prefill(tokens)
    assert np.abs(expected).max() > 0.1
    for target in ("reference", "cpu"):
        with Model.load(kept.path, target=target, mode="a16", threads=1) as model:
            found = model.session().prefill(tokens)
            assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max(), target


def test_parts_of_other_types_lie_apart(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def mixed(name: str, values: np.ndarray[Any, Any]) -> Type:
        return Type.Q8_0 if "attn_v" in name else Type.F16 if "token_embd" in name else in_type(Type.Q5_0)(name, values)

    write_gguf(checkpoint("llama_mha"), tmp_path / "m.gguf", mixed)
    plan = planned(open_source(str(tmp_path / "m.gguf"), HubAccess()), ConvertOptions())
    file = carry_out(plan, tmp_path / "m.edgeq", silent).file
    codecs = {name: linear.weights[0].codec for name, linear in file.metadata.linears.items()}
    assert codecs["layers.1.q"] == codecs["layers.1.gate_up"] == codecs["head"] == Codec("int", 5, 32)
    assert codecs["layers.1.v"] == Codec("int", 8, 32) and file.metadata.arrays["embedding"].dtype == "f16"


def test_parts_of_a_split_file_are_found(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("llama_gqa")
    write_gguf(folder, tmp_path / "whole.gguf")
    split(tmp_path / "whole.gguf", tmp_path / "m", 3)
    whole = open_source(str(tmp_path / "whole.gguf"), HubAccess())
    parts = open_source(str(tmp_path / "m-00001-of-00003.gguf"), HubAccess())
    assert parts.name == "m.gguf" and len(parts.files()) == 3 and parts.tensors().keys() == whole.tensors().keys()
    for name, tensor in parts.tensors().items():
        count = math.prod(tensor.shape)
        assert np.array_equal(tensor.read(0, count, name), whole.tensors()[name].read(0, count, name))
    (tmp_path / "m-00002-of-00003.gguf").rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"1 of its 3 parts are missing: m-00002-of-00003\.gguf; download"):
        open_source(str(tmp_path / "m-00001-of-00003.gguf"), HubAccess())
    (tmp_path / "m-00002-of-00003.gguf").write_bytes((tmp_path / "m-00003-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match="says that it is part 2 of 3, not 1 of 3"):
        open_source(str(tmp_path / "m-00001-of-00003.gguf"), HubAccess())


def split(path: Path, stem: Path, count: int) -> None:
    """The tensors of a file in several, the metadata in the first, as llama-gguf-split does it."""
    reader = gguf.GGUFReader(path)
    for number in range(count):
        writer = gguf.GGUFWriter(f"{stem}-{number + 1:05}-of-{count:05}.gguf", "llama")
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0])
        for key, value in (("split.no", number), ("split.count", count), ("split.tensors.count", len(reader.tensors))):
            writer.add_uint16(key, value)
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.fixture
def file(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    write_gguf(checkpoint("llama_gqa"), tmp_path / "m.gguf", in_type(Type.Q8_0))
    return tmp_path / "m.gguf"


SETTINGS: list[tuple[dict[str, Any], type[EdgeqError], str]] = [
    ({"general.architecture": "mamba"}, UnsupportedError, "architecture 'mamba' is not supported; supported: llama, smollm3"),
    ({"general.architecture": "clip"}, UnsupportedError, "a file of kind 'mmproj', not a model: give the file of the model"),
    ({"general.type": "adapter"}, UnsupportedError, "a file of kind 'adapter', not a model"),
    ({"llama.block_count": None}, CheckpointError, r"llama\.block_count is missing; expected an integer"),
    ({"llama.attention.head_count_kv": [2, 2]}, CheckpointError, r"head_count_kv is array.*expected an integer"),
    ({"llama.attention.head_count": 0}, CheckpointError, r"head_count is 0; expected a positive integer"),
    ({"llama.attention.value_length": 16}, UnsupportedError, "heads of 32 and 16; supported: keys and values of one even size"),
    ({"llama.attention.layer_norm_rms_epsilon": math.nan}, CheckpointError, "rms_epsilon is nan; expected a number"),
    ({"llama.rope.scaling.type": "new"}, UnsupportedError, "rope.scaling.type is 'new'; supported: none, linear, yarn"),
    ({"llama.rope.scaling.type": "yarn"}, CheckpointError, r"rope\.scaling\.factor is missing; expected a number"),
    ({"llama.expert_count": [8, 8]}, CheckpointError, r"expert_count is array.*expected an integer"),
    ({"llama.logit_scale": [0.5, 1.0]}, UnsupportedError, r"logit_scale is array.*supported: 0\.0 or 1\.0"),
    ({"llama.attention.window_of_tomorrow": 4}, UnsupportedError, r"window_of_tomorrow is 4; supported: files without it"),
    ({"llama.logit_scale": 0.5}, UnsupportedError, r"llama\.logit_scale is 0\.5; supported: 0\.0 or 1\.0"),
    ({"llama.feed_forward_length": 64}, CheckpointError, r"mlp\.gate_proj\.weight has the shape"),
    ({"general.alignment": 48}, CheckpointError, "general.alignment is 48; expected a power of two"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), SETTINGS, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_metadata_that_edgeq_does_not_run_are_refused_by_key(
    checkpoint: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], kind: type[EdgeqError], message: str
) -> None:
    def change(keys: dict[str, Any]) -> None:
        keys |= changes
        for key in [key for key, value in keys.items() if value is None]:
            del keys[key]

    path = tmp_path / "m.gguf"
    if "general.architecture" in changes:
        # The writer puts this key there itself.
        write_gguf(checkpoint("llama_gqa"), path)
        name = changes["general.architecture"].encode()
        old = struct.pack("<Q", 5) + b"llama"
        path.write_bytes(path.read_bytes().replace(old, struct.pack("<Q", len(name)) + name, 1))
    elif "general.alignment" in changes:
        write_gguf(checkpoint("llama_gqa"), path, change=lambda keys: keys.update({"general.alignment": 32}))
        data = path.read_bytes()
        at = data.index(b"general.alignment") + len(b"general.alignment") + 4
        path.write_bytes(data[:at] + struct.pack("<I", 48) + data[at + 4 :])
    else:
        write_gguf(checkpoint("llama_gqa"), path, change=change)
    with pytest.raises(kind, match=message):
        planned(open_source(str(path), HubAccess()), ConvertOptions())


def test_powers_of_two_of_mxfp4_that_are_no_f16_are_refused_where_they_count(tmp_path: Path) -> None:
    raw = random_blocks(39, 16, 2)
    raw[3, 1] = 0
    expected = gguf.dequantize(raw.reshape(16, -1), Type.MXFP4)
    for exponent, bad in ((104, False), (143, False), (103, True), (144, True), (255, True), (0, True)):
        for zeros in (False, True):
            raw[5, 1, 0], raw[5, 1, 1:] = exponent, 0x80 if zeros else 0x21
            (tmp_path / "data").write_bytes(raw.tobytes())
            tensor = GgufTensor(tmp_path / "data", (16, 64), 39, 0)
            if bad and not zeros:
                with pytest.raises(CheckpointError, match="t has a scale .*as MXFP4 a power of two that is no f16"):
                    tensor.quantized(0, 16, "t")
                assert not np.isfinite(tensor.read(0, 16 * 64, "t")).all()
                continue
            expected = gguf.dequantize(raw.reshape(16, -1), Type.MXFP4)
            assert np.array_equal(dequantized(tensor.codec, 64, tensor.quantized(0, 16, "t")), expected)


def test_all_tensors_of_types_without_a_codec_are_named_at_once(file: Path) -> None:
    data, kinds = bytearray(file.read_bytes()), {}
    for name, number in (("blk.0.ffn_down.weight", 23), ("blk.1.ffn_down.weight", 23), ("blk.1.ffn_up.weight", 99)):
        at = data.index(name.encode()) + len(name) + 4 + 2 * 8
        assert data[at : at + 4] == struct.pack("<I", 8)
        data[at : at + 4] = struct.pack("<I", number)
        kinds[name] = number
    file.write_bytes(data)
    with pytest.raises(UnsupportedError) as error:
        open_source(str(file), HubAccess())
    assert "IQ4_XS: 2 (blk.0.ffn_down.weight, blk.1.ffn_down.weight); type 99: 1 (blk.1.ffn_up.weight)" in str(error.value)
    assert "Q4_K" in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_file_is_one_clear_error(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    down = data.index(b"blk.0.ffn_down.weight")
    up = data.index(b"blk.0.ffn_up.weight")
    after = down + len(b"blk.0.ffn_down.weight") + 4
    offset = slice(after + 20, after + 28)
    other = struct.pack("<Q", struct.unpack("<Q", data[offset])[0] - 32)
    cases: list[tuple[bytes, str]] = [
        (b"", "m.gguf: the header ends inside 'magic'"),
        (b"GGUF", "the header ends inside 'version'"),
        (b"GGML" + data[4:], "not a GGUF file"),
        (data[:4] + struct.pack(">I", 3) + data[8:], "a big-endian GGUF file"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "version 1 of GGUF; supported: 2 and 3"),
        (data[:8] + struct.pack("<Q", 1 << 60) + data[16:], f"{1 << 60} tensors; at most "),
        (data[:16] + struct.pack("<Q", 1 << 40) + data[24:], f"{1 << 40} metadata entries; at most"),
        (data[:24] + struct.pack("<Q", 1 << 62) + data[32:], f"a metadata key of {1 << 62} bytes"),
        (data[:100], "20 tensors; at most 3 are possible"),
        (data[:700], "more than a file of 700 bytes holds"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 100) + b"abcdef", "the header ends inside 'metadata key'"),
        (data[:-100], "truncated: "),
        (data[:up] + b"blk.0.ffn_up.weighs" + data[up + 19 :], r"tensor blk\.0\.ffn_up\.weighs has no place in a LlamaFor"),
        (data.replace(b"blk.1.ffn_down.weight", b"blk.0.ffn_down.weight"), r"tensor 'blk\.0\.ffn_down\.weight' is there twice"),
        (data[: offset.start] + other + data[offset.stop :], "lies over another tensor"),
        (data[: offset.start] + struct.pack("<Q", 1 << 50) + data[offset.stop :], "starts at byte"),
        (data[: offset.start] + struct.pack("<Q", 33) + data[offset.stop :], "starts at byte 33"),
        (data[: after - 4] + struct.pack("<I", 9) + data[after:], "has 9 dimensions; expected 1 to 4"),
        (data[:after] + struct.pack("<QQ", 1 << 32, 1 << 32) + data[after + 16 :], "more than a file of"),
        (data[:after] + struct.pack("<Q", 257) + data[after + 8 :], r"\(\d+, 257\), no rows of whole blocks of Q8_0"),
    ]
    for changed, message in cases:
        file.write_bytes(changed)
        with pytest.raises((CheckpointError, UnsupportedError), match=message) as error:
            planned(open_source(str(file), HubAccess()), ConvertOptions())
        assert "\n" not in str(error.value)


def test_scales_that_are_no_numbers_are_refused_when_they_are_read(file: Path, tmp_path: Path) -> None:
    source = open_source(str(file), HubAccess())
    tensor = source.tensors()["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(tensor, GgufTensor)
    data = bytearray(file.read_bytes())
    data[tensor.offset : tensor.offset + 2] = struct.pack("<e", math.inf)
    file.write_bytes(data)
    plan = planned(open_source(str(file), HubAccess()), ConvertOptions())
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has a scale or an offset that is NaN or infinite"):
        carry_out(plan, tmp_path / "m.edgeq", silent)


def test_rope_factors_that_are_not_llama3s_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    # The tiny checkpoint was made for 64 positions; llama.cpp stores the factors and not that number.
    write_gguf(checkpoint("llama3_rope"), tmp_path / "m.gguf")
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight are not those of Llama 3 with any factor"):
        open_source(str(tmp_path / "m.gguf"), HubAccess())


def test_a_file_converts_where_torch_is_not_installed(file: Path, tmp_path: Path) -> None:
    code = f"""
import sys
for name in ("torch", "transformers", "safetensors", "huggingface_hub", "gguf"):
    sys.modules[name] = None
sys.path.insert(0, {str(Path(__file__).parent)!r})
import shutil
from pathlib import Path
import edgeq
from edgeq.converters.importers import gguf_source
def texts(metadata, folder, given, picture):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path({str(Path(__file__).parents[3])!r}) / "models" / "tiny-llama" / name, folder / name)
gguf_source.write_texts = texts
print(edgeq.convert({str(file)!r}, {str(tmp_path / "bare.edgeq")!r}).size)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    plan = planned(open_source(str(file), HubAccess()), ConvertOptions())
    expected = carry_out(plan, tmp_path / "with.edgeq", silent).file
    assert (tmp_path / "bare.edgeq").read_bytes() == expected.path.read_bytes()
    assert json.loads(run.stdout) == expected.size
