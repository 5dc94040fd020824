"""edgeq, with 4-bit weights of the decoder and 8-bit ones of the tower, activations of 8 bits, one scale for a row of each."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time

from edgeq import __version__, targets
from edgeq.runtime.network.vision import Tower
from edgeq.tools.lab.peers.pictures import Seconds, Size
from edgeq.tools.measure import picture_bench

NAME = "model.edgeq"


def version() -> str:
    return __version__


def build(checkpoint: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "edgeq", "convert", str(checkpoint), "-o", str(folder / NAME), "--method", "rtn"]
    settings = ["--bits", "4/8", "--activations", "token", "--group-size", "row", "--sym"]
    made = subprocess.run([*command, *settings], capture_output=True, text=True)
    if made.returncode:
        raise ValueError(made.stderr.strip().splitlines()[-1])


def load(folder: Path, threads: int, most_patches: int, isa: str | None) -> Edgeq:
    return Edgeq(folder / NAME, threads, most_patches, isa)


class Edgeq:
    """A loaded model; see `Viewer`."""

    def __init__(self, path: Path, threads: int, most_patches: int, isa: str | None) -> None:
        tokens = most_patches // 4
        self._model = import_module("edgeq.runtime").Model.load(
            path, mode="a8", threads=threads, threads_prefill=threads, isa=isa, image_tokens=tokens, context=2 * tokens
        )
        target = targets.load("cpu")
        self._tower = Tower(self._model.file, target, self._model.program.options, most_patches)
        self.settings = f"{self._model.description}; tower 8 bits, decoder 4, a scale for each row"

    def see(self, size: Size) -> Seconds:
        picture = picture_bench.drawn(self._model, size)
        prompt = picture_bench.prompt_of(self._model, picture)
        began, worked = perf_counter(), process_time()
        self._tower.encode(picture.patches, [picture.grid])
        tower, worked = perf_counter() - began, process_time() - worked
        with self._model.session() as session:
            began = perf_counter()
            session.prefill(prompt)
            return Seconds(tower, worked, perf_counter() - began)
