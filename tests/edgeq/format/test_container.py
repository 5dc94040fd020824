"""Every way in which a file can be wrong, with its bytes; none may end in anything but one clear error, or allocate first."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import flatbuffers
import numpy as np
import pytest

from edgeq.errors import EdgeqError, FormatError, InputError, UnsupportedError
from edgeq.format.codec import dequantize
from edgeq.format.container import DATA_OFFSET, MAGIC, ModelFile
from edgeq.format.metadata_codec import decode, encode
from edgeq.format.schema import model_generated as fb
from edgeq.format.writer import Writer
from tests.edgeq.format.sample_file import CONFIG, refused, seal, split, write_body

Write = Callable[[bytes], Path]


def test_what_was_written_is_read_back(write: Write, sample: bytes) -> None:
    file = ModelFile.open(write(sample))
    assert file.metadata.config == CONFIG
    assert file.blob("tokenizer.json") == b'{"version":"1.0"}' and file.blob("chat_template") is None
    done = list(file.verify())
    assert len(done) == len(file.segments)
    weight = file.metadata.linears["layers.0.qkv"].weights[0]
    assert list(weight.arrays) == ["q", "scale", "zero"]
    w = dequantize(weight.codec, 64, 32, {name: file.array(ref) for name, ref in weight.arrays.items()})
    assert w.shape == (64, 32) and np.isfinite(w).all() and w.any()
    assert not file.array(weight.arrays["q"]).flags.writeable
    decoded, segments = decode(split(sample)[1])
    assert encode(decoded, segments) == split(sample)[1]


def test_segments_are_aligned_contiguous_and_in_execution_order(write: Write, sample: bytes) -> None:
    file = ModelFile.open(write(sample))
    assert file.segments[0].offset == DATA_OFFSET and all(s.offset % 64 == 0 for s in file.segments)
    assert file.owner(0) == "layers.0.qkv q" and file.owner(len(file.segments) - 1) == "tokenizer.json"


def test_bytes_per_token_are_in_the_metadata(sample: bytes) -> None:
    model = fb.Model.GetRootAs(split(sample)[1], 0)
    stored = model.BytesPerToken()
    sizes = decode(split(sample)[1])[0].bytes_per_token()
    assert (stored.Weights(), stored.Head()) == (sizes["weights"], sizes["head"])
    assert stored.KvPerPosition() == sizes["kv_per_position"] == 2 * 2 * 16 * 2


def test_no_such_file(tmp_path: Path) -> None:
    refused(tmp_path / "none.edgeq", InputError, "no such file")


def test_a_folder(tmp_path: Path) -> None:
    refused(tmp_path, InputError, "cannot read it")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.edgeq")
    refused(tmp_path / "pipe.edgeq", FormatError, "not an .edgeq file")


@pytest.mark.parametrize(
    "data",
    [b"", b"e", MAGIC, MAGIC + bytes(55), b"GGUF\x03".ljust(64, b"\0"), b"PK\x03\x04" * 20, b"<!DOCTYPE>" * 9, bytes(40000)],
    ids=["empty", "one byte", "magic alone", "63 bytes", "gguf", "zip", "html", "zeros"],
)
def test_not_an_edgeq_file(write: Write, data: bytes) -> None:
    refused(write(data), FormatError, "not an .edgeq file; make one with: edgeq convert")


@pytest.mark.parametrize("lost", [1, 8, 64, 4096, -64, -65, -DATA_OFFSET, -DATA_OFFSET - 1])
def test_truncated(write: Write, sample: bytes, lost: int) -> None:
    """Cut at the end, after the header, and at the start of the data."""
    refused(write(sample[: -lost if lost > 0 else -lost]), FormatError, "its header states .* truncated or damaged")


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 64, b"PK\x05\x06" + bytes(18)])
def test_extended(write: Write, sample: bytes, extra: bytes) -> None:
    refused(write(sample + extra), FormatError, "truncated or damaged")


def test_one_bit_flipped_in_the_header(write: Write, sample: bytes) -> None:
    for bit in range(8 * 64):
        data = bytearray(sample)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EdgeqError):
            ModelFile.open(write(bytes(data)))


@pytest.mark.parametrize("at", [64, 4095, DATA_OFFSET - 1])
def test_bytes_hidden_after_the_header(write: Write, sample: bytes, at: int) -> None:
    data = bytearray(sample)
    data[at] = 1
    refused(write(bytes(data)), FormatError, "after the header are not zero")


def test_one_bit_flipped_in_the_metadata(write: Write, sample: bytes) -> None:
    start, rng = len(sample) - len(split(sample)[1]), random.Random(5)
    for _ in range(400):
        data = bytearray(sample)
        data[rng.randrange(start, len(sample))] ^= 1 << rng.randrange(8)
        with pytest.raises(FormatError, match="metadata does not match its digest"):
            ModelFile.open(write(bytes(data)))


def test_one_bit_flipped_in_the_data_is_found_by_verify_which_names_the_layer(write: Write, sample: bytes) -> None:
    segments = decode(split(sample)[1])[1]
    for segment in segments:
        data = bytearray(sample)
        data[segment.offset + segment.length // 2] ^= 0x10
        file = ModelFile.open(write(bytes(data)))
        owner = file.owner(segments.index(segment))
        with pytest.raises(FormatError, match=f"{owner} is damaged .segment {segments.index(segment)}."):
            list(file.verify())


def test_bytes_hidden_in_the_padding_are_found_by_verify(write: Write, sample: bytes) -> None:
    data = bytearray(sample)
    last = decode(split(sample)[1])[1][-1]
    data[last.offset + last.length] = 1
    with pytest.raises(FormatError, match="padding after segment"):
        list(ModelFile.open(write(bytes(data))).verify())


def test_a_newer_version_says_to_upgrade(write: Write, sample: bytes) -> None:
    data = bytearray(sample)
    data[8:12] = (2).to_bytes(4, "little")
    refused(write(bytes(data)), UnsupportedError, "format version 2; this edgeq reads up to 1: upgrade edgeq")


@pytest.mark.parametrize("field", range(16, 48, 8))
@pytest.mark.parametrize("value", [0, 1, 2**31, 2**63 - 64, 2**64 - 64, 2**64 - 1])
def test_absurd_lengths_in_the_header(write: Write, sample: bytes, field: int, value: int) -> None:
    data = bytearray(sample)
    data[field : field + 8] = value.to_bytes(8, "little")
    refused(write(bytes(data)), FormatError, "damaged|at most")


def test_metadata_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path, sample: bytes) -> None:
    path, length = tmp_path / "sparse.edgeq", 1 << 40
    data = bytearray(sample[:DATA_OFFSET])
    data[24:32], data[32:40] = (0).to_bytes(8, "little"), DATA_OFFSET.to_bytes(8, "little")
    data[40:48] = length.to_bytes(8, "little")
    with open(path, "wb") as file:
        file.write(data)
        file.truncate(DATA_OFFSET + length)
    refused(path, FormatError, "claims 1099511627776 bytes of metadata; at most")


def test_an_input_order_that_names_a_channel_twice_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "order.edgeq")
    metadata = write_body(writer)
    order = writer.array(np.arange(32, dtype=np.int32) // 2, "i32")
    metadata.linears["layers.0.o"] = replace(metadata.linears["layers.0.o"], input_order=order)
    with pytest.raises(FormatError, match="layers.0.o: input_order is not a permutation of 32 channels"):
        writer.finish(metadata)


@pytest.mark.parametrize(
    ("name", "wide", "entry"),
    [("layers.0.o", False, 32), ("layers.0.o", False, -32), ("layers.0.o", True, -128), ("head", False, 32)],
)
def test_a_table_with_entries_that_are_too_large_is_refused(
    write: Write, sample: bytes, name: str, wide: bool, entry: int
) -> None:
    """Sums of products in 16 bits would overflow."""
    data, metadata = split(sample)
    read, segments = decode(metadata)
    layer = read.linears[name]
    codec = replace(layer.weights[0].codec, wide=wide)
    read.linears[name] = replace(layer, weights=(replace(layer.weights[0], codec=codec),))
    changed = bytearray(data)
    changed[segments[layer.weights[0].arrays["table"].segment].offset - DATA_OFFSET + 15] = entry & 255
    message = f"{name}: its table has entries from .*{entry}.*; those of {codec.name} have"
    refused(write(seal(bytes(changed), encode(read, segments))), FormatError, message)


def test_an_absurd_segment_count_is_refused_before_the_loop(sample: bytes, write: Write) -> None:
    data, metadata = split(sample)
    model = fb.Model.GetRootAs(metadata, 0)
    vector = model._tab.Vector(model._tab.Offset(12)) - 4
    assert int.from_bytes(metadata[vector : vector + 4], "little") == model.SegmentsLength()
    for count in (2**18 + 1, 2**31, 2**32 - 1):
        forged = bytearray(metadata)
        forged[vector : vector + 4] = count.to_bytes(4, "little")
        refused(write(seal(data, bytes(forged))), FormatError, f"claims {count} segments; at most")


@pytest.mark.parametrize("metadata", [b"", b"EDGQ", bytes(8), b"\xff\xff\xff\xffEDGQ", b"\x08\0\0\0EDGQ" + b"\xff" * 64])
def test_metadata_that_is_no_flatbuffer(write: Write, sample: bytes, metadata: bytes) -> None:
    refused(write(seal(split(sample)[0], metadata)), FormatError, "metadata")


def test_a_required_text_that_is_missing(write: Write, sample: bytes) -> None:
    builder = flatbuffers.Builder(64)
    fb.ModelStart(builder)
    builder.Finish(fb.ModelEnd(builder), file_identifier=b"EDGQ")
    refused(write(seal(split(sample)[0], bytes(builder.Output()))), FormatError, "metadata lacks default_mode")


def test_mutations_never_end_in_anything_but_one_error(sample: bytes, write: Write) -> None:
    """Bytes set, bits flipped, words replaced by extremes, runs copied, cut or put in; header and digest always right."""
    data, metadata = split(sample)
    rng, opened = random.Random(11), 0
    extremes = [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, len(metadata), len(metadata) - 4]
    for _ in range(500):
        forged = bytearray(metadata)
        for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
            at = rng.randrange(len(forged) - 4)
            match rng.randrange(5):
                case 0:
                    forged[at] ^= 1 << rng.randrange(8)
                case 1:
                    forged[at] = rng.randrange(256)
                case 2:
                    forged[at : at + 4] = rng.choice(extremes).to_bytes(4, "little")
                case 3:
                    start = rng.randrange(len(forged) - 4)
                    forged[at : at + 4] = forged[start : start + 4]
                case 4:
                    forged[at:at] = rng.randbytes(rng.randrange(1, 9))
        try:
            ModelFile.open(write(seal(data, bytes(forged))))
            opened += 1
        except EdgeqError as error:
            assert len(str(error)) < 4000
    # Padding, digests of segments, provenance text: some changes are not visible in the structure.
    assert 0 < opened < 250
