"""Headers of safetensors files from strangers: each is refused by what is wrong with it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import CheckpointError
from edgeq.format.safetensors import MAX_HEADER, read_header


def safetensors(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE_HEADERS: list[tuple[Any, bytes, int | None, str]] = [
    (b"", b"", None, "truncated or not"),
    (b"{}", b"", MAX_HEADER + 1, "truncated or not"),
    (b"{}", b"", 2**63, "truncated or not"),
    (b"[" * 100000, b"", None, "not JSON"),
    (b"{1}", b"", None, "not JSON"),
    (b"[1]", b"", None, "not an object"),
    ({"w": 3}, b"", None, "lacks dtype"),
    ({"w": entry(dtype="F12")}, bytes(8), None, "F12"),
    ({"w": entry(dtype=["F32"])}, bytes(8), None, "is not known"),
    ({"w": entry(shape=[-2])}, bytes(8), None, "shape"),
    ({"w": entry(shape=[1] * 9)}, bytes(8), None, "shape"),
    ({"w": entry(shape=[2**39, 2**39])}, bytes(8), None, "needs"),
    ({"w": entry(offsets=[0, 2**61])}, bytes(8), None, "data_offsets"),
    ({"w": entry(offsets=[8, 0])}, bytes(8), None, "bytes"),
    ({"w": entry(offsets=[4, 12])}, bytes(12), None, "starts at byte 4"),
    ({"v": entry(), "w": entry()}, bytes(8), None, "starts at byte 0 instead of 8"),
    ({"w": entry()}, bytes(7), None, "truncated"),
    ({"w": entry()}, bytes(9), None, "truncated or damaged"),
]


@pytest.mark.parametrize(("header", "data", "length", "says"), HOSTILE_HEADERS)
def test_a_hostile_safetensors_header_is_refused(
    tmp_path: Path, header: Any, data: bytes, length: int | None, says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_header(safetensors(tmp_path / "x.safetensors", header, data, length))
