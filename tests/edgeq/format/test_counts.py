"""Opening takes time and memory in proportion to the file: counts are bounded by what the data area can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest

from edgeq.errors import FormatError
from edgeq.format import metadata_codec
from edgeq.format.container import DATA_OFFSET, ModelFile
from edgeq.format.metadata_codec import MAX_ARRAYS, decode
from edgeq.format.schema import model_generated as fb
from tests.edgeq.format.sample_file import CONFIG, seal, split


def table(builder: Any, name: str, **fields: Any) -> Any:
    getattr(fb, f"{name}Start")(builder)
    for field, value in fields.items():
        getattr(fb, f"{name}Add{field}")(builder, value)
    return getattr(fb, f"{name}End")(builder)


def vector(builder: Any, offsets: list[Any]) -> Any:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


def shared_tables(segments: int, linears: int = 0, arrays: int = 0, *, names: int = 1, parts: int = 1) -> bytes:
    """Metadata of as many entries, whose tables all share their contents; entries have `names` names in turn.

    `parts`: arrays of each linear layer, at most 4.
    """
    b = flatbuffers.Builder(1 << 20)
    texts = {"Config": CONFIG.to_json(), "Generation": "{}", "Provenance": "{}", "DefaultMode": "a16"}
    fields = {field: b.CreateString(text) for field, text in texts.items()}
    segment = table(b, "Segment", Offset=DATA_OFFSET, Length=64, Digest=b.CreateByteVector(bytes(16)))
    array = table(b, "Array", Shape=b.CreateNumpyVector(np.array([1], "u8")))
    weights = vector(b, [table(b, "Weight", Codec=table(b, "Codec", Kind=0), Rows=1, Columns=1, Q=array)])
    others = dict.fromkeys(("Bias", "InputOrder", "InputScale")[: parts - 1], array)
    labels = [b.CreateString(f"n{i}") for i in range(names)]
    layers = [table(b, "Linear", Name=label, Weights=weights, **others) for label in labels if linears]
    named = [table(b, "NamedArray", Name=label, Array=array) for label in labels if arrays]
    fields["Segments"] = vector(b, [segment] * segments)
    fields["Linears"] = vector(b, [layers[i % names] for i in range(linears)])
    fields["Arrays"] = vector(b, [named[i % names] for i in range(arrays)])
    b.Finish(table(b, "Model", **fields), file_identifier=b"EDGQ")
    return bytes(b.Output())


def test_segments_are_bounded_by_the_data(tmp_path: Path) -> None:
    path = tmp_path / "segments.edgeq"
    for data, match in ((64 * 99, "claims 100 segments; at most 99"), (64 * 100, "segment 1 does not follow")):
        path.write_bytes(seal(bytes(data), shared_tables(100)))
        with pytest.raises(FormatError, match=match):
            ModelFile.open(path)


def test_layers_arrays_and_blobs_are_bounded_by_the_segments() -> None:
    metadata, segments = decode(shared_tables(30, 10, 20, names=20))
    assert (len(metadata.linears), len(metadata.arrays), len(segments)) == (10, 20, 30)
    with pytest.raises(FormatError, match="claims 31 layers, arrays, blobs and kernels; its 30 segments"):
        decode(shared_tables(30, 10, 21, names=21))


def test_the_arrays_of_linear_layers_are_bounded_by_the_segments() -> None:
    assert len(decode(shared_tables(40, 10, names=10, parts=4))[0].linears) == 10
    with pytest.raises(FormatError, match="n9: the linear layers up to this one have more arrays"):
        decode(shared_tables(39, 10, names=10, parts=4))


def test_arrays_have_a_limit_of_their_own() -> None:
    assert len(decode(shared_tables(MAX_ARRAYS, 0, MAX_ARRAYS, names=MAX_ARRAYS))[0].arrays) == MAX_ARRAYS
    with pytest.raises(FormatError, match=f"claims {MAX_ARRAYS + 1} arrays; at most {MAX_ARRAYS}"):
        decode(shared_tables(MAX_ARRAYS + 1, 0, MAX_ARRAYS + 1, names=1))


def test_one_table_that_stands_for_many_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {name: counted(monkeypatch, name) for name in ("_read_named_array", "_read_linear")}
    with pytest.raises(FormatError, match="array 'n0' twice"):
        decode(shared_tables(MAX_ARRAYS, 0, MAX_ARRAYS))
    with pytest.raises(FormatError, match="linear layer 'n0' twice"):
        decode(shared_tables(1 << 14, 1 << 14))
    assert {name: len(calls) for name, calls in read.items()} == {"_read_named_array": 2, "_read_linear": 2}


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[None]:
    """Grows by one with every call of that function of the decoder."""
    calls, function = list[None](), getattr(metadata_codec, name)

    def counting(*arguments: Any) -> Any:
        calls.append(None)
        return function(*arguments)

    monkeypatch.setattr(metadata_codec, name, counting)
    return calls


class ComparedName(str):
    """A name that counts how often names are compared."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        ComparedName.comparisons += 1
        return str.__eq__(self, other)


def test_the_time_per_entry_does_not_grow_with_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few names are compared, where the last equals the first; searching a list would compare each with all before it."""
    text = metadata_codec._text
    monkeypatch.setattr(metadata_codec, "_text", lambda *arguments: ComparedName(text(*arguments)))
    with pytest.raises(FormatError, match="'n0' twice"):
        decode(shared_tables(4001, 0, 4001, names=4000))
    assert 0 < ComparedName.comparisons < 4001


@pytest.mark.parametrize("number", ("1e400", "-1e999", '[{"x": 1e309}]'))
def test_a_number_beyond_a_double_is_refused(sample: bytes, number: str, tmp_path: Path) -> None:
    data, metadata = split(sample)
    model = fb.ModelT.InitFromObj(fb.Model.GetRootAs(metadata, 0))
    model.provenance = f'{{"a": {number}, "b": 1e308}}'
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), file_identifier=b"EDGQ")
    path = tmp_path / "number.edgeq"
    path.write_bytes(seal(data, bytes(builder.Output())))
    with pytest.raises(FormatError, match="which is too large"):
        ModelFile.open(path)
