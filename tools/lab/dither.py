"""A source for comparisons, made of a model whose published weights are quantized already.

    python -m edgeq.tools.lab.dither MODEL.gguf OUT

Such weights lie on a grid, and a quantizer whose groups match finds it again and loses nothing, which says little about models
as they are trained.  Here every quantized weight moves by up to half a step of its own grid to either side, evenly drawn: OUT
is a checkpoint of transformers in float16, near MODEL, on no grid.  What is measured on it is the loss against OUT, not MODEL.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.exporters.safetensors_file import OutputTensor, write_safetensors
from edgeq.converters.importers import open_source
from edgeq.errors import InputError
from edgeq.format.codec import dequantized
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.terminal import note, progress

if TYPE_CHECKING:
    from edgeq.converters.checkpoint.source import QuantizedTensor, StoredTensor


def dithered(tensor: QuantizedTensor, name: str, random: np.random.Generator) -> NDArray[np.float32]:
    """The values of a tensor of integers with scales, each moved by up to half of the distance to its neighbour on the grid."""
    codec, columns = tensor.codec, tensor.shape[-1]
    assert codec is not None
    arrays = dict(tensor.quantized(0, int(np.prod(tensor.shape)) // columns, name))
    values = dequantized(codec, columns, arrays)
    above = dequantized(codec, columns, arrays | {"q": arrays["q"].astype(np.float32) + 1})
    moved = values + random.uniform(-0.5, 0.5, values.shape).astype(np.float32) * (above - values)
    if tensor.order is not None:
        moved[:, tensor.order] = moved.copy()
    return cast("NDArray[np.float32]", moved.reshape(tensor.shape))


def dither(source: str, out: Path, seed: int) -> None:
    """Write the folder `out`.  InputError: it exists, or no weight of `source` is quantized."""
    if out.exists():
        raise InputError(f"{out}: it exists; give the name of a new folder")
    opened = open_source(source, HubAccess())
    if not opened.quantized:
        raise InputError(f"{source}: its weights are floats; compare with it as it is")
    tensors, random = opened.tensors(), np.random.default_rng(seed)

    def values(name: str, tensor: StoredTensor) -> NDArray[np.float16]:
        if tensor.codec is not None:
            return dithered(cast("QuantizedTensor", tensor), name, random).astype(np.float16)
        return tensor.read(0, int(np.prod(tensor.shape)), name).reshape(tensor.shape).astype(np.float16)

    out.mkdir(parents=True)
    for path in opened.texts.iterdir():
        if path.suffix in (".json", ".jinja", ".model") and path.name != "config.json" and ".safetensors" not in path.name:
            shutil.copy(path, out)
    (out / "config.json").write_text(json.dumps({**opened.config, "dtype": "float16"}, indent=2), encoding="utf-8")
    # Tensors are made in the order of the file: a seed gives the same weights each time.
    written = {
        name: OutputTensor("F16", tensor.shape, lambda name=name, tensor=tensor: values(name, tensor))  # type: ignore[misc]
        for name, tensor in tensors.items()
    }
    with progress() as report:
        write_safetensors(out / "model.safetensors", written, lambda done, size: report(done, size, "writing"))


@click.command(cls=Command)
@click.argument("source", metavar="MODEL")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Start of the random numbers.")
def main(source: str, out: Path, seed: int) -> None:
    """Write MODEL, whose weights are quantized, as the checkpoint OUT with weights that lie on no grid."""
    dither(source, out, seed)
    note(f"{out}: written")


if __name__ == "__main__":
    main()
