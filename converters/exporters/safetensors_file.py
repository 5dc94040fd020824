"""A safetensors file, written a tensor at a time: the package of that name wants all of them in memory at once."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeq.format.codec import AnyArray
from edgeq.format.safetensors import NUMPY, SIZES


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written.  `values`: makes its array when its turn comes, bf16 as uint16."""

    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], AnyArray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


def write_safetensors(path: Path, tensors: Mapping[str, OutputTensor], on_progress: Callable[[int, int], None]) -> None:
    """`on_progress`: (bytes written, all bytes)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            values = tensor.values()
            assert values.shape == tensor.shape, (values.shape, tensor.shape)
            file.write(values.astype(NUMPY[tensor.dtype], copy=False).tobytes())
            done += tensor.nbytes
            on_progress(done, at)
