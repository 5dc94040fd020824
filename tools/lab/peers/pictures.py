"""Vision-language models side by side: the vision tower alone, and the time to the first token.

All peers get one random checkpoint (make_checkpoint.py) and pictures of noise of the same sizes, in turns, each in a fresh
process.  A peer that has no decoder here is timed by its tower.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import from_bf16
from edgeq.tools.measure import alternating
from edgeq.tools.measure.alternating import shown

PATCH = 14
PEERS = {"edgeq": "edgeq_pictures", "llama.cpp": "llama_cpp_pictures", "openvino": "openvino_pictures"}
SEED = 0
Size = tuple[int, int]
"""Width and height in pixels, multiples of 28."""


@dataclass(frozen=True)
class Seconds:
    """The tower, and of what the processor worked for it in all threads; `first`: tower, prompt and the first token, of a peer
    that has a decoder."""

    tower: float
    processor: float
    first: float | None


class Viewer(Protocol):
    """A loaded model."""

    settings: str

    def see(self, size: Size) -> Seconds: ...


class PicturePeer(Protocol):
    """The interface of a module of PEERS.  Its functions run in the process of the peer and import the peer when called."""

    def version(self) -> str: ...

    def build(self, checkpoint: Path, folder: Path) -> None: ...

    def load(self, folder: Path, threads: int, most_patches: int, isa: str | None) -> Viewer:
        """`isa`: the instruction set of edgeq's kernels, None: the best that this processor has; others are built for one."""
        ...


def module(peer: str) -> PicturePeer:
    return cast(PicturePeer, import_module(f"edgeq.tools.lab.peers.{PEERS[peer]}"))


class Checkpoint:
    """The tensors of a checkpoint of one file, as float32, without a library."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        path = folder / "model.safetensors"
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(length))
        self._data = np.memmap(path, np.uint8, "r", offset=8 + length)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        about = self._header[name]
        start, end = about["data_offsets"]
        return from_bf16(self._data[start:end].view(np.uint16)).reshape(about["shape"])


def make_checkpoint(folder: Path, name: str, layers: int | None) -> None:
    """Write that of a shape, with so many layers of the decoder and of the tower."""
    # A peer's Python has not all that this needs.
    maker = import_module("edgeq.tools.lab.make_checkpoint")
    shape = maker.SHAPES[name]
    if layers:
        shape = replace(shape, layers=layers, tower=replace(shape.tower, layers=layers))
    folder.mkdir(parents=True, exist_ok=True)
    maker.make(folder, shape, SEED)


@dataclass
class PictureLine:
    """What was measured of one peer at one size, or why it was not."""

    peer: str
    size: Size
    threads: int
    settings: str = ""
    seconds: list[Seconds] = field(default_factory=list)
    failure: str | None = None

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.size[0]}x{self.size[1]}"


@dataclass
class PictureContest:
    """`process`: a worker of the Python at a path (contest.process); `python`: that of each peer."""

    work: Path
    shape: str
    layers: int | None
    sizes: Sequence[Size]
    process: Callable[[str], Any]
    python: Callable[[str], str]
    report: Callable[[float, float, str], None]
    error: type[Exception]
    isa: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def run(self, wanted: Sequence[str], threads: int, rounds: int) -> list[PictureLine]:
        """Build what is not there, then the rounds."""
        found = [peer for peer in wanted if self._built(peer)]
        lines = [PictureLine(peer, size, threads) for size in self.sizes for peer in found]
        alternating.rounds(lines, rounds, self._round, self.error, report=self.report)
        return lines

    def folder(self, peer: str) -> Path:
        return self.work / f"{self.shape}-{self.layers or 'all'}-{peer}"

    def _built(self, peer: str) -> bool:
        checkpoint, folder = self.folder("checkpoint"), self.folder(peer)
        try:
            with self.process(self.python(peer)) as worker:
                self.versions[peer] = worker.ask(do="version_pictures", peer=peer)
                if not (folder / "built").exists():
                    if not (checkpoint / "tokenizer.json").exists():
                        make_checkpoint(checkpoint, self.shape, self.layers)
                    self.report(0, 0, f"build for {peer}")
                    folder.mkdir(parents=True, exist_ok=True)
                    worker.ask(do="build_pictures", peer=peer, checkpoint=str(checkpoint), folder=str(folder))
                    (folder / "built").touch()
        except self.error as error:
            self.left_out[peer] = str(error)
            return False
        return True

    def _round(self, line: PictureLine) -> None:
        patches = max(width * height for width, height in self.sizes) // PATCH**2
        with self.process(self.python(line.peer)) as worker:
            names = {"do": "load_pictures", "peer": line.peer, "folder": str(self.folder(line.peer))}
            line.settings = worker.ask(**names, threads=line.threads, patches=patches, isa=self.isa)
            # The first run allocates and, in some peers, compiles for the size.
            worker.ask(do="see", size=line.size)
            line.seconds.append(Seconds(**worker.ask(do="see", size=line.size)))


def ratios(line: PictureLine, mine: PictureLine) -> tuple[str, str, str]:
    """How many times as long this peer takes as edgeq did in the same round: median and range, of the tower, of the processor
    and to the first token."""
    pairs = list(zip(line.seconds, mine.seconds, strict=False))
    towers = [theirs.tower / ours.tower for theirs, ours in pairs]
    processors = [theirs.processor / ours.processor for theirs, ours in pairs]
    firsts = [theirs.first / ours.first for theirs, ours in pairs if theirs.first and ours.first]
    return shown(towers, 1, 2, "×"), shown(processors, 1, 2, "×"), shown(firsts, 1, 2, "×")


def cells(lines: Sequence[PictureLine]) -> list[list[str]]:
    """The table, its heading first."""
    found = [["", "picture", "t", "tower", "edgeq is", "processor", "edgeq is", "first token", "edgeq is"]]
    mine: Mapping[Size, PictureLine] = {line.size: line for line in lines if line.peer == "edgeq"}
    for line in lines:
        towers = [each.tower for each in line.seconds]
        processors = [each.processor for each in line.seconds]
        firsts = [each.first for each in line.seconds if each.first]
        against = ("", "", "") if line.peer == "edgeq" or line.size not in mine else ratios(line, mine[line.size])
        tower = f"failed: {line.failure}" if line.failure else shown(towers, 1e-3, 0, " ms")
        size = f"{line.size[0]} x {line.size[1]}"
        found.append([line.peer, size, str(line.threads), tower, against[0]])
        found[-1] += [shown(processors, 1e-3, 0, " ms"), against[1], shown(firsts, 1e-3, 0, " ms"), against[2]]
    return found
