"""What a vision-language model costs: `python -m edgeq.tools.lab.vision_costs WORK [--only prefill,memory]`.

prefill   of rows of pictures by the decoder with constant scales, beside scales of a row and of a block and beside the same
          file without online transforms
order     of a run with the rows of pictures first, beside the order of the sequence
decode    of the file beside its decoder as a file for text
memory    of a picture that is read, and of one that the tower encodes

Files with random weights are made in WORK and kept (vision_files.py).  What is compared takes turns in one process, in
seconds of the processor; ratios are of the same round.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np

from edgeq.runtime import Model
from edgeq.runtime.session import BatchItem, RowOrder, Session, run_together
from edgeq.tools.entry import Command
from edgeq.tools.lab.make_checkpoint import SHAPES
from edgeq.tools.lab.vision_files import copies, source
from edgeq.tools.picture_bench import drawn, prompt_of

ROWS, MIXED_ROWS, MIXED_PICTURE = 1024, 497, 256
"""Of a prefill; of one with a picture in the middle, and rows of that."""
TOKENS, SIDE = 6, 896
"""Tokens of a decode in a round; pixels of a side of the picture that the tower encodes."""
FORMATS = {"JPEG": ("JPEG", "RGB"), "PNG": ("PNG", "RGB"), "PNG with transparency": ("PNG", "RGBA")}
LARGE, SMALL = (4000, 3000), (8, 8)
PARTS = ("prefill", "order", "decode", "memory")


def alternating(runs: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor of each, after a round that is not counted; every second round has them the other way round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name in runs if i % 2 else reversed(list(runs)):
            began = time.process_time()
            runs[name]()
            found[name].append(time.process_time() - began)
    return {name: taken[1:] for name, taken in found.items()}


def beside(taken: Mapping[str, list[float]], first: str) -> list[dict[str, Any]]:
    """For each: seconds, median and range, and how many times those of `first` in the same round."""
    lines = []
    for name, seconds in taken.items():
        ratios = [a / b for a, b in zip(seconds, taken[first], strict=True)]
        lines.append({"name": name, "seconds": spread(seconds), "ratio": spread(ratios)})
    return lines


def spread(values: list[float]) -> list[float]:
    """Median, smallest, largest."""
    return [statistics.median(values), min(values), max(values)]


def item(session: Session, rows: int, picture: slice) -> BatchItem:
    """A prompt of tokens, some of which bring vectors of a picture."""
    random, which = np.random.default_rng(0), np.full(rows, -1, np.int32)
    count = len(range(rows)[picture])
    which[picture] = np.arange(count)
    vectors = random.standard_normal((count, session_width(session)), np.float32)
    return BatchItem(session, list(random.integers(10, 500, rows)), [rows - 1], (), (vectors, which))


def session_width(session: Session) -> int:
    pictures = session._pictures
    assert pictures is not None
    return int(pictures.vision.feature_size)


def runs_of(session: Session, prompt: BatchItem, order: RowOrder = "sequence") -> Callable[[], None]:
    def run() -> None:
        session.trim(0)
        session.row_order = order
        run_together([prompt])

    return run


def loaded(path: Path, isa: str | None, image_tokens: int | None = ROWS) -> Model:
    options: Mapping[str, Any] = {"context": 2 * ROWS, "max_rows": ROWS, "image_tokens": image_tokens}
    return Model.load(path, mode="a8", threads=1, threads_prefill=1, isa=isa, **options)


def prefill(files: Mapping[str, Path], rounds: int, isa: str | None) -> dict[str, Any]:
    """Runs of rows of a picture."""
    names = ("static", "token", "block", "no transform")
    sessions = {name: loaded(files[name], isa).session() for name in names}
    runs = {name: runs_of(session, item(session, ROWS, slice(None))) for name, session in sessions.items()}
    taken = alternating(runs, rounds)
    shares = [1 - b / a for a, b in zip(taken["static"], taken["no transform"], strict=True)]
    return {"lines": beside(taken, "static"), "transforms": spread(shares)}


def order(files: Mapping[str, Path], rounds: int, isa: str | None) -> dict[str, Any]:
    """Runs of text, a picture and text."""
    first = (MIXED_ROWS - MIXED_PICTURE) // 2
    model = loaded(files["static"], isa)
    sessions: dict[RowOrder, Session] = {"sequence": model.session(), "modality": model.session()}
    runs: dict[str, Callable[[], None]] = {
        name: runs_of(session, item(session, MIXED_ROWS, slice(first, first + MIXED_PICTURE)), name)
        for name, session in sessions.items()
    }
    return {"lines": beside(alternating(runs, rounds), "sequence")}


def decode(files: Mapping[str, Path], rounds: int, isa: str | None) -> dict[str, Any]:
    """A few tokens after a short text.  Both files are read from the disk again: a copy lies in smaller or larger pages, which
    would be compared."""
    for name in ("text", "static"):
        with files[name].open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sessions = {"text": loaded(files["text"], isa, None).session(), "with a tower": loaded(files["static"], isa).session()}
    for session in sessions.values():
        session.prefill(list(range(10, 74)))

    def tokens(session: Session) -> Callable[[], None]:
        def run() -> None:
            session.trim(64)
            for token in range(TOKENS):
                session.prefill([10 + token])

        return run

    return {"lines": beside(alternating({name: tokens(session) for name, session in sessions.items()}, rounds), "text")}


def anonymous_bytes() -> int:
    """Of memory that this process has for itself.  Linux."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def tower_memory(path: Path, isa: str | None) -> dict[str, Any]:
    """What a picture takes beyond a text of as many rows, for each of its patches; in a process of its own."""
    model = loaded(path, isa)
    with model.session() as session:
        session.prefill([10] * ROWS)
    before = anonymous_bytes()
    picture = drawn(model, (SIDE, SIDE))
    with model.session() as session:
        session.prefill(prompt_of(model, picture))
        return {"patches": len(picture.patches), "bytes_per_patch": (anonymous_bytes() - before) / len(picture.patches)}


def reading_memory(path: Path, name: str) -> float:
    """Bytes for each pixel that the process which decodes a picture takes more than for a tiny one; in a process of its own."""
    from PIL import Image

    kind, mode = FORMATS[name]
    model, peaks = loaded(path, None), []
    for size in (SMALL, LARGE):
        data = BytesIO()
        Image.linear_gradient("L").resize(size).convert(mode).save(data, kind)
        encoded = data.getvalue()
        model.read_image(encoded)
        peaks.append(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    return (peaks[1] - peaks[0]) / (LARGE[0] * LARGE[1])


def memory(files: Mapping[str, Path], rounds: int, isa: str | None) -> dict[str, Any]:
    """Every number from a fresh process."""

    def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()

    reading = {name: fresh(reading_memory, files["static"], name) for name in FORMATS}
    tower: dict[str, Any] = fresh(tower_memory, files["block"], isa)
    return {"reading_bytes_per_pixel": reading} | tower


def table(found: Mapping[str, Any]) -> str:
    """Markdown of all parts."""
    lines = ["| | processor, ms | ratio |", "|---|---|---|"]
    for part in ("prefill", "order", "decode"):
        for line in found.get(part, {}).get("lines", ()):
            seconds = "{:.1f} [{:.1f}–{:.1f}]".format(*(1000 * s for s in line["seconds"]))
            lines.append(f"| {part}, {line['name']} | {seconds} | " + "{:.3f} [{:.3f}–{:.3f}] |".format(*line["ratio"]))
    if "prefill" in found:
        lines += ["", "online transforms: {:.1%} [{:.1%}–{:.1%}] of the prefill".format(*found["prefill"]["transforms"])]
    if "memory" in found:
        about = found["memory"]
        lines += ["", *(f"reading, {name}: {n:.1f} bytes per pixel" for name, n in about["reading_bytes_per_pixel"].items())]
        lines.append(f"tower: {about['bytes_per_patch'] / 1000:.1f} KB for each of {about['patches']} patches")
    return "\n".join(lines)


@click.command(cls=Command)
@click.argument("work", type=click.Path(file_okay=False, path_type=Path))
@click.option("--shape", type=click.Choice([n for n, s in SHAPES.items() if s.tower]), default="qwen2-vl-2b", show_default=True,
              help="The published shape.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Layers of decoder and tower.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="How often what is compared takes turns.")
@click.option("--isa", help="Instruction set; the best of this machine unless given.")
@click.option("--only", default=",".join(PARTS), show_default=True, help="What is measured.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of markdown.")
def main(work: Path, shape: str, layers: int, rounds: int, isa: str | None, only: str, as_json: bool) -> None:
    """Measure what a vision-language model costs, on files that are made in the folder WORK."""
    wanted = only.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}", param_hint="--only")
    work.mkdir(parents=True, exist_ok=True)
    files = copies(source(work, shape, layers))
    parts = {"prefill": prefill, "order": order, "decode": decode, "memory": memory}
    found = {name: parts[name](files, rounds, isa) for name in wanted}
    click.echo(json.dumps(found, indent=1) if as_json else table(found))


if __name__ == "__main__":
    main()
