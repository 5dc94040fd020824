"""Model files as llama.cpp reads them: GGUF there and back is the same bytes, and our own codecs are the same numbers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from edgeq.converters.exporters import gguf_export
from edgeq.converters.exporters.export import export
from edgeq.converters.exporters.gguf_blocks import blocks_of, fits_ternary, held_as
from edgeq.converters.exporters.gguf_network import network_of
from edgeq.converters.exporters.gguf_tokenizer import tokenizer_keys, vocabulary_keys
from edgeq.converters.importers.gguf_tokenizers import tokenizer_json
from edgeq.converters.importers.gguf_types import BLOCK_TYPES, TERNARY
from edgeq.converters.importers.gguf_vocabulary import read_vocabulary
from edgeq.errors import InputError, UnsupportedError
from edgeq.format.codec import FLOAT_KINDS, MAX_ENTRY, Codec, Kind, as_float32, dequantized
from edgeq.format.container import ModelFile
from edgeq.tools.cli.main import main
from tests.cli.refusal import refused
from tests.converters.importers.gguf_files import in_type, random_blocks, write_gguf
from tests.converters.importers.test_export import converted, silent
from tests.converters.importers.test_gguf import FAMILIES as IMPORTED
from tests.converters.importers.test_gguf_texts import BYTE_LEVEL, SENTENCE_PIECE, changed

Checkpoint = Callable[..., Path]
FAMILIES = {name: changes for name, changes in IMPORTED.items() if name[:1] != "m" and "moe" not in name}


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: None) -> None:
    """The tokenizer is not what a test is about."""
    monkeypatch.setattr(gguf_export, "tokenizer_keys", lambda *_: {})


def raw_tensors(path: Path) -> dict[str, tuple[Type, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor of a GGUF file."""
    return {t.name: (t.tensor_type, tuple(map(int, t.shape)), t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("number", BLOCK_TYPES, ids=lambda number: BLOCK_TYPES[number].name)
def test_blocks_come_back_byte_for_byte(number: int) -> None:
    block = BLOCK_TYPES[number]
    raw = random_blocks(number, 5, 4)
    arrays = block.unpack(raw)
    held = held_as(block.codec, 4 * block.width, arrays.get("table"), fits_ternary(block.codec, arrays))
    written = blocks_of(block.codec, held, arrays)
    if block.name != "TQ1_0":
        assert held.name == block.name and np.array_equal(written, raw.reshape(5, -1))
        return
    # Five digits in a byte: the same numbers in the other ternary type.
    assert held.name == "TQ2_0"
    bits = (
        gguf.dequantize(each, kind).view(np.uint32) for each, kind in ((written, Type.TQ2_0), (raw.reshape(5, -1), Type.TQ1_0))
    )
    assert np.array_equal(*bits)


def test_two_bits_are_ternary_if_no_weight_and_no_scale_says_otherwise() -> None:
    codec, arrays = TERNARY, BLOCK_TYPES[35].unpack(random_blocks(35, 4, 2))
    assert fits_ternary(codec, arrays) and not fits_ternary(replace(codec, group_size=64), arrays)
    scale, q = arrays["scale"].copy(), arrays["q"].copy()
    scale[1, 2] += np.float16(0.5)
    q[3, 500] = 0
    for other in ({"scale": scale}, {"q": q}, {"q": arrays["q"][:, :384], "scale": scale[:, :3]}):
        changed = {**arrays, **other}
        assert not fits_ternary(codec, changed)
        columns = changed["q"].shape[1]
        held = held_as(codec, columns)
        assert held.name == "Q4_0"
        found = gguf.dequantize(blocks_of(codec, held, changed), Type.Q4_0)
        assert np.array_equal(found, dequantized(codec, columns, changed))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(
            family, kind, marks=() if (i + j) % 2 == 0 else pytest.mark.exhaustive, id=f"{family}-{kind and kind.name}"
        )
        for i, family in enumerate(FAMILIES)
        for j, kind in enumerate((None, Type.Q4_0, Type.Q5_1, Type.MXFP4))
    ],
)
def test_a_gguf_file_comes_back_tensor_for_tensor(
    checkpoint: Checkpoint, tmp_path: Path, texts: None, family: str, kind: Type | None
) -> None:
    source, back = tmp_path / "a.gguf", tmp_path / "back.gguf"
    write_gguf(checkpoint(family, **FAMILIES[family]), source, *([in_type(kind)] if kind else []))
    method = {} if kind else {"method": "none"}
    file = converted(source, tmp_path / "a.edgeq", **method)
    assert export(file.path, "gguf", back, False, silent) == []
    before, after = raw_tensors(source), raw_tensors(back)
    assert after.keys() == before.keys()
    computed = [after.pop("rope_freqs.weight", None), before.pop("rope_freqs.weight", None)]
    if computed[0] and computed[1]:
        np.testing.assert_allclose(*(np.frombuffer(each[2], np.float32) for each in computed if each), rtol=1e-6)
    assert after == before
    ours, theirs = file.metadata.config, converted(back, tmp_path / "b.edgeq", **method).metadata.config
    # The file has it in float32.
    assert theirs.rope.attention_factor == pytest.approx(ours.rope.attention_factor, rel=1e-6)
    assert replace(theirs, rope=replace(theirs.rope, attention_factor=ours.rope.attention_factor)) == ours
    assert not list(tmp_path.glob("*.partial"))


def test_types_that_the_package_does_not_write_come_back(checkpoint: Checkpoint, tmp_path: Path, texts: None) -> None:
    kinds = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.TQ2_0]
    folder = checkpoint("llama_gqa", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=2)
    source, back = tmp_path / "a.gguf", tmp_path / "back.gguf"
    write_gguf(folder, source, lambda name, values: kinds[len(name) % 7] if values.ndim > 1 else Type.F32)
    export(converted(source, tmp_path / "a.edgeq").path, "gguf", back, False, silent)
    assert raw_tensors(back) == raw_tensors(source)


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_codec_of_integers_is_written_as_the_same_numbers(bits: int) -> None:
    for symmetric in (True, False):
        for group_size in (32, 64, 0):
            codec_of_integers_is_written_as_the_same_numbers(bits, symmetric, group_size)


def codec_of_integers_is_written_as_the_same_numbers(bits: int, symmetric: bool, group_size: int) -> None:
    codec, rows, columns = Codec("int", bits, group_size, symmetric), 7, 96
    rng, groups = np.random.default_rng(bits), codec.groups(columns)
    arrays = {"q": rng.integers(0, 1 << bits, (rows, columns), np.uint8)}
    arrays["q"][0, :2] = 0, (1 << bits) - 1
    arrays["scale"] = rng.normal(0, 0.01, (rows, groups)).astype(np.float16)
    if not symmetric:
        arrays["zero"] = rng.integers(0, 1 << bits, (rows, groups), np.uint8)
        arrays["zero"][:2, 0] = 0, (1 << bits) - 1
    if (bits, symmetric) == (8, False):
        with pytest.raises(UnsupportedError, match="9 bits.*--sym"):
            held_as(codec, columns)
        return
    held = held_as(codec, columns)
    found = gguf.dequantize(blocks_of(codec, held, arrays), Type(held.type))
    assert np.array_equal(found, dequantized(codec, columns, arrays))
    needed = bits if symmetric else bits + 1
    assert held.name == ("Q4_0" if needed <= 4 else "Q5_0" if needed == 5 else "Q8_0")


@pytest.mark.parametrize("bits", range(2, 8))
def test_grids_without_zero_are_written_as_the_same_numbers(bits: int) -> None:
    codec, rng = Codec("half", bits, 64), np.random.default_rng(bits)
    arrays: dict[str, Any] = {"q": rng.integers(0, 1 << bits, (3, 160), np.uint8)}
    arrays["scale"] = rng.normal(0, 0.01, (3, 3)).astype(np.float16)
    held = held_as(codec, 160)
    assert np.array_equal(gguf.dequantize(blocks_of(codec, held, arrays), Type(held.type)), dequantized(codec, 160, arrays))
    arrays["scale"][0, 0] = 2**-24
    with pytest.raises(UnsupportedError, match="whose half is no f16"):
        blocks_of(codec, held, arrays)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bits", range(1, 5))
def test_other_tables_are_written_as_the_same_numbers(bits: int, wide: bool) -> None:
    codec, rng, most = Codec("table", bits, 64, wide=wide), np.random.default_rng(bits), MAX_ENTRY[wide]
    arrays: dict[str, Any] = {"q": rng.integers(0, 1 << bits, (19, 160), np.uint8)}
    arrays["scale"] = rng.normal(0, 0.01, (19, 3)).astype(np.float16)
    tables = rng.integers(-most, most + 1, (2, 1 << bits)).astype(np.int8)
    arrays["table"] = np.repeat(tables, 16, axis=0)[:19]
    held = held_as(codec, 160, tables)
    assert held.name == "Q8_0"
    assert np.array_equal(gguf.dequantize(blocks_of(codec, held, arrays), Type(held.type)), dequantized(codec, 160, arrays))


def test_mxfp4_has_powers_of_two_alone() -> None:
    arrays = BLOCK_TYPES[39].unpack(random_blocks(39, 4, 2))
    codec, table = BLOCK_TYPES[39].codec, arrays["table"]
    held = held_as(codec, 64, table)
    arrays["scale"][1, 1] = 0.75
    with pytest.raises(UnsupportedError, match="no power of two"):
        blocks_of(codec, held, arrays)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_offsets_are_written_as_the_same_numbers(bits: int) -> None:
    codec, rng = Codec("offset", bits, 64), np.random.default_rng(bits)
    arrays: dict[str, Any] = {"q": rng.integers(0, 1 << bits, (3, 160), np.uint8)}
    arrays |= {name: rng.normal(0, 0.01, (3, 3)).astype(np.float16) for name in ("scale", "offset")}
    held = held_as(codec, 160)
    assert np.array_equal(gguf.dequantize(blocks_of(codec, held, arrays), Type(held.type)), dequantized(codec, 160, arrays))


@pytest.mark.parametrize(
    ("codec", "columns", "words"),
    [
        (Codec("int", 4, 16), 64, "groups of 16 .*--group-size 32"),
        (Codec("int", 4, 0), 80, "groups of a row for 80 columns"),
        (Codec("offset", 8, 64), 64, "offsets with 4 and 5 bits"),
        (Codec("half", 8, 64), 64, "9 bits"),
        (Codec("s4", 2, 32), 64, "no such weights"),
        (Codec("two-level", 4, 32, symmetric=False), 128, "whole blocks of 256"),
        (Codec("two-level", 5, 16), 256, "scales of two levels"),
    ],
)
def test_what_no_type_holds_is_refused_by_name(codec: Codec, columns: int, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        held_as(codec, columns)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_kind_of_codec_is_written_as_the_same_numbers_or_refused(kind: Kind) -> None:
    """A new kind must be known here, or refused: never written as if it were another."""
    floats = kind in FLOAT_KINDS
    codec = Codec(kind) if floats else Codec(kind, 3 if kind == "trellis" else 4, 32)
    columns, rng = 256, np.random.default_rng(0)
    shapes = {} if floats else {name: part for name, part in codec.parts(16, columns).items() if name != "q"}
    try:
        held = held_as(codec, columns)
    except UnsupportedError:
        assert kind in ("two-level", "s4", "trellis")
        return
    if floats:
        assert held.name == kind.upper()
        return
    arrays: dict[str, Any] = {"q": rng.integers(0, 16, (16, columns), np.uint8)}
    arrays |= {name: rng.normal(0, 0.01, (16, part.shape[1])).astype(part.dtype) for name, part in shapes.items()}
    found = gguf.dequantize(blocks_of(codec, held, arrays), Type(held.type))
    assert np.array_equal(found, dequantized(codec, columns, arrays))


@pytest.mark.parametrize("family", ["llama_gqa", "qwen2", "gemma3"])
def test_a_quantized_checkpoint_is_written_as_the_same_numbers(
    checkpoint: Checkpoint, tmp_path: Path, texts: None, family: str
) -> None:
    options = {"method": "rtn", "bits": 4, "group_size": 32, "symmetric": False, "head": 6}
    file = converted(checkpoint(family, **FAMILIES.get(family, {})), tmp_path / "a.edgeq", **options)
    notes = export(file.path, "gguf", tmp_path / "o.gguf", False, silent)
    assert any("i4 g32 zero as Q5_0, 5.50 bits per weight for" in note for note in notes)
    again = converted(tmp_path / "o.gguf", tmp_path / "b.edgeq")
    assert again.metadata.config == file.metadata.config
    assert values_of(again) == values_of(file)


def values_of(file: ModelFile) -> dict[str, bytes]:
    """The numbers of every matrix and array, by the names of the formats' common parts."""
    from edgeq.converters.exporters.contents import TensorNames, exported
    from edgeq.converters.exporters.gguf_network import layer_names

    model = exported(file, TensorNames(layer_names, "embedding.weight", "head.weight", "norm.weight"))
    found = {name: weight.values() for name, weight in model.weights.items()}
    for name, weight in model.weights.items():
        if (bias := weight.bias()) is not None:
            found[f"{name}.bias"] = as_float32(bias[1], bias[0].lower())
    found |= {name: array.values() for name, array in model.arrays.items()}
    return {name: values.tobytes() for name, values in found.items()}


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("mistral", "sliding_windows of this network is"),
        ("opt", "LayerNorm"),
        ("mixtral", "experts"),
    ],
)
def test_a_network_that_gguf_does_not_say_is_refused(checkpoint: Checkpoint, tmp_path: Path, family: str, words: str) -> None:
    changes = {"sliding_window": 24} if family == "mistral" else {}
    file = converted(checkpoint(family, **changes), tmp_path / "a.edgeq", method="rtn", bits=4, group_size=32)
    with pytest.raises(UnsupportedError, match=words):
        export(file.path, "gguf", tmp_path / "o.gguf", False, silent)
    assert [path.name for path in tmp_path.glob("o.gguf*")] == []


def test_a_kind_of_model_without_an_architecture_there_is_refused(tiny: ModelFile) -> None:
    with pytest.raises(UnsupportedError, match="kind lfm2 .*gemma3_text"):
        network_of(replace(tiny.metadata.config, model_type="lfm2"))


def test_a_mistral_without_windows_comes_back_as_a_llama(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = converted(checkpoint("mistral", sliding_window=None), tmp_path / "a.edgeq", method="rtn", bits=4, group_size=32)
    assert network_of(file.metadata.config).architecture == "llama"


def test_the_tokenizer_comes_back(tiny: ModelFile, tmp_path: Path) -> None:
    keys = tokenizer_keys(tiny, "llama")
    assert keys["tokenizer.ggml.model"] == "gpt2" and len(keys["tokenizer.ggml.tokens"]) == tiny.metadata.config.vocab_size
    export(tiny.path, "gguf", tmp_path / "t.gguf", False, silent)
    again = converted(tmp_path / "t.gguf", tmp_path / "again.edgeq")
    text = "def read_file(path):\n    return open(path).read()  # 12,345 ütf 🙂"
    ours, theirs = (Tokenizer.from_str(bytes(file.blob("tokenizer.json") or b"").decode()) for file in (tiny, again))
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert again.metadata.generation["eos_token_ids"] == tiny.metadata.generation["eos_token_ids"]


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize(
    "metadata",
    [
        BYTE_LEVEL,
        changed(BYTE_LEVEL, pre="qwen2", add_bos_token=True),
        changed(BYTE_LEVEL, pre="llama-bpe", eot_token_id=6),
        changed(SENTENCE_PIECE, padding_token_id=2),
        changed(SENTENCE_PIECE, add_space_prefix=False, add_bos_token=False, add_eos_token=True),
    ],
    ids=["gpt-2", "qwen2", "llama-bpe", "prefix", "no-prefix"],
)
def test_tokenizers_come_back_to_the_letter(metadata: dict[str, Any], architecture: str) -> None:
    metadata = {**metadata, "general.architecture": architecture}
    vocabulary = read_vocabulary(metadata)
    tokenizer = tokenizer_json(metadata, vocabulary)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ends = [vocabulary.ids[name] for name in ("eos", "eot") if name in vocabulary.ids]
    generation = {"bos_token_id": vocabulary.ids["bos"], "eos_token_ids": ends}
    generation["special_tokens"] = {name: vocabulary.literal(key) for key, name in names.items() if vocabulary.literal(key)}
    keys = vocabulary_keys(tokenizer, generation, len(vocabulary.tokens) + 3, architecture)
    again = read_vocabulary(keys)
    assert again.ids == vocabulary.ids and again.tokens[:-3] == vocabulary.tokens and again.merges == vocabulary.merges
    assert again.tokens[-1] == f"[PAD{len(again.tokens) - 1}]"
    found = tokenizer_json({"general.architecture": architecture, **keys}, again)
    found["model"]["vocab"] = {token: i for token, i in found["model"]["vocab"].items() if not token.startswith("[PAD")}
    assert found == tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """The demo model."""
    folder = Path(__file__).parents[3] / "models" / "tiny-llama"
    return converted(folder, tmp_path_factory.mktemp("tiny") / "tiny.edgeq", method="rtn", bits=4, group_size=64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["model"].update(type="Unigram"), "kind Unigram"),
        (lambda t: t.update(pre_tokenizer=odd_split()), "splits texts by"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "in another way"),
    ],
    ids=["kind", "split", "normalizer"],
)
def test_a_tokenizer_that_gguf_does_not_say_is_refused(
    tiny: ModelFile, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    content = json.loads(bytes(tiny.blob("tokenizer.json") or b""))
    change(content)
    read = ModelFile.blob
    changed = json.dumps(content).encode()
    monkeypatch.setattr(ModelFile, "blob", lambda self, name: changed if name == "tokenizer.json" else read(self, name))
    with pytest.raises(UnsupportedError, match=words):
        tokenizer_keys(tiny, "llama")


def odd_split() -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": "[aeiou]+"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def edgeq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command(tiny: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "t.gguf"
    made = edgeq("export", tiny.path, "--to", "gguf", "-o", output)
    assert made.exit_code == 0 and not made.stdout and made.stderr.splitlines()[-1] == f"{output}: written", made.stderr
    refused(edgeq("export", tiny.path, "--to", "gguf", "-o", output), "is there already", "--force")
    assert edgeq("export", tiny.path, "--to", "gguf", "-o", output, "--force").exit_code == 0
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    refused(edgeq("export", tiny.path, "--to", "gguf", "-o", mine, "--force"), "is no GGUF file")
    with pytest.raises(InputError, match="no GGUF file"):
        export(tiny.path, "gguf", tmp_path, True, silent)
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        refused(edgeq("export", tiny.path, "--to", "gguf", "-o", tmp_path / "x.gguf"), "as gguf", "MB free")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(edgeq("export", tiny.path, "--to", "gguf", "-o", tmp_path / "x.gguf"), 'pip install "edgeq[gguf]"')
    assert mine.read_text() == "precious" and not (tmp_path / "x.gguf.partial").exists()
