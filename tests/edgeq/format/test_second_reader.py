"""A reader written from docs/format.md alone: it knows the tables of the page, and of FlatBuffers only the wire format."""

from __future__ import annotations

import re
import struct
from itertools import cycle
from typing import Any

import flatbuffers
import pytest

from edgeq.format.schema import model_generated as fb
from tests.edgeq.format.sample_file import split
from tests.edgeq.format.test_format_page import BODIES, named, rows, section

SCALARS = {"ubyte": "B", "bool": "?", "uint": "I", "ulong": "Q", "float": "f"}
ENUMS = {name for kind, name in BODIES if kind == "enum"}
TABLES = {
    name: [(named(cells[0])[0], named(cells[1])[0]) for cells in rows(section(f"Table `{name}`"), "field")]
    for kind, name in BODIES
    if kind == "table"
}


def scalar(data: bytes, at: int, kind: str) -> Any:
    return struct.unpack_from("<" + SCALARS["ubyte" if kind in ENUMS else kind], data, at)[0]


def follow(data: bytes, at: int) -> int:
    return at + int.from_bytes(data[at : at + 4], "little")


def table(data: bytes, at: int, name: str) -> dict[str, Any]:
    """The fields of a table by the names of the page; slot i of its vtable is line i of the page."""
    vtable = at - struct.unpack_from("<i", data, at)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    values = {}
    for i, (field, text) in enumerate(TABLES[name]):
        kind, _, default = text.replace(" (required)", "").partition(" = ")
        slot = struct.unpack_from("<H", data, vtable + 4 + 2 * i)[0] if 4 + 2 * i < size else 0
        if slot:
            values[field] = value(data, at + slot, kind)
        elif kind in SCALARS or kind in ENUMS:
            values[field] = {"true": True, "": 0}.get(default) if default in ("true", "") else int(default)
        else:
            values[field] = None
    return values


def value(data: bytes, at: int, kind: str) -> Any:
    if kind in SCALARS or kind in ENUMS:
        return scalar(data, at, kind)
    start = follow(data, at)
    if kind == "string":
        length = int.from_bytes(data[start : start + 4], "little")
        return data[start + 4 : start + 4 + length]
    if kind.startswith("["):
        inner = kind[1:-1]
        width = struct.calcsize(SCALARS[inner]) if inner in SCALARS else 4
        places = range(start + 4, start + 4 + width * int.from_bytes(data[start : start + 4], "little"), width)
        return [scalar(data, p, inner) if inner in SCALARS else table(data, follow(data, p), inner) for p in places]
    return table(data, start, kind)


def plain(value: Any) -> Any:
    """What the generated reader gives, as dictionaries with the names of the page."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if type(value).__name__.endswith("T") and hasattr(value, "__dict__"):
        return {re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", key): plain(each) for key, each in vars(value).items()}
    return value.tolist() if hasattr(value, "tolist") else value


def everything() -> bytes:
    """Metadata in which every field of every table has a value that is not its default."""
    number = cycle(range(5, 200))

    def filled(name: str) -> Any:
        made = getattr(fb, f"{name}T")()
        for field, text in TABLES[name]:
            attribute = re.sub(r"_(\w)", lambda m: m[1].upper(), field)
            setattr(made, attribute, some(text.replace(" (required)", "").partition(" = ")[0]))
        return made

    def some(kind: str) -> Any:
        if kind in ENUMS:
            return 1
        if kind in SCALARS:
            return False if kind == "bool" else next(number)
        if kind == "string":
            return f"text {next(number)}"
        return [some(kind[1:-1]), some(kind[1:-1])] if kind.startswith("[") else filled(kind)

    builder = flatbuffers.Builder(1 << 12)
    builder.Finish(filled("Model").Pack(builder), file_identifier=b"EDGQ")
    return bytes(builder.Output())


@pytest.mark.parametrize("what", ["sample", "everything"])
def test_it_reads_what_the_generated_reader_reads(what: str, sample: bytes) -> None:
    data = split(sample)[1] if what == "sample" else everything()
    assert data[4:8] == b"EDGQ"
    read = table(data, follow(data, 0), "Model")
    expected = plain(fb.ModelT.InitFromObj(fb.Model.GetRootAs(data, 0)))
    assert comparable(read) == comparable(expected)


def comparable(value: Any) -> Any:
    """Without the difference between an absent list and an empty one, and between bytes and text."""
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [comparable(each) for each in value] or None
    return value.decode() if isinstance(value, bytes) else value
