"""What a token costs beside the bytes that it reads: `python -m edgeq.tools.lab.fixed_time [SHAPE SHAPE ...]`.

Files of random weights in published shapes and one codec are decoded in turn.  Milliseconds per token over bytes per token are
a line: its slope is the bandwidth that decode reaches, its intercept, `fixed_ms`, what the number of operations, launches and
the host cost.  Beside it are the launches of a token and, where a token is started as one graph, the time in which the host did
not wait for the device; a device that is no processor states both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from edgeq.codec import Codec
from edgeq.errors import InputError
from edgeq.runtime import Model
from edgeq.targets.target import Program
from edgeq.tools.entry import Command
from edgeq.tools.lab.gpu_roofline import MODELS, config_of
from edgeq.tools.lab.make_checkpoint import SHAPES
from edgeq.tools.lab.peers.table import aligned
from edgeq.tools.random_file import write_random
from edgeq.tools.report import facts, step_bytes
from edgeq.tools.terminal import progress

CODEC = Codec("int", 4, 128)
WARM_UP = 4
TEXT_SHAPES = tuple(name for name, shape in SHAPES.items() if shape.tower is None)


@dataclass(frozen=True)
class Point:
    """Tokens of one shape.

    bytes      that a token reads, with the cache in the middle of those decoded
    seconds    of a token, the median of all;  launches: of a token, None: the target counts none
    host_s     of a token in which the host did not wait for the device; None: the target is the host, or does not know
    """

    shape: str
    bytes: float
    seconds: float
    launches: int | None
    host_s: float | None
    facts: dict[str, Any]


@dataclass(frozen=True)
class Line:
    """fixed_ms   milliseconds of a token that reads nothing;  bytes_per_s: at which bytes add to it, None: they add nothing
    largest_error   of a point, as a share of its time; 0 for two points
    """

    fixed_ms: float
    bytes_per_s: float | None
    largest_error: float


def line(points: Sequence[Point]) -> Line:
    """The line of least squares of relative errors.  InputError: fewer than two numbers of bytes."""
    sizes, seconds = (np.array([getattr(point, name) for point in points]) for name in ("bytes", "seconds"))
    if len(set(sizes.tolist())) < 2:
        raise InputError("a line needs two shapes that read different numbers of bytes; name another one")
    both = np.stack([np.ones_like(sizes), sizes], 1) / seconds[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(both, np.ones_like(seconds), rcond=None)
    errors = np.abs(fixed + slope * sizes - seconds) / seconds
    return Line(1000 * float(fixed), 1 / float(slope) if slope > 0 else None, float(errors.max()) if len(points) > 2 else 0.0)


def measured(path: Path, shape: str, tokens: int, repetitions: int, report: Callable[[float], None], **options: Any) -> Point:
    """Decode `tokens` tokens `repetitions` times, each from the beginning of a text."""
    with Model.load(path, context=WARM_UP + tokens, max_logits=1, **options) as model:
        program, times, waited = model.program, list[float](), 0.0
        for i in range(repetitions):
            report(i / repetitions)
            session = model.session()
            for token in range(WARM_UP + tokens):
                before, began = _waited_s(program) or 0.0, perf_counter()
                session.decode(token % model.config.vocab_size)
                if token >= WARM_UP:
                    times.append(perf_counter() - began)
                    waited += (_waited_s(program) or 0.0) - before
        host = None if _waited_s(program) is None else (sum(times) - waited) / len(times)
        read = step_bytes(model, WARM_UP + (tokens + 1) // 2)
        return Point(shape, read, statistics.median(times), getattr(program, "kernels_per_token", None), host, facts(model))


def _waited_s(program: Program) -> float | None:
    """Seconds in which the host waited for the device so far."""
    found: float | None = getattr(program, "waited_s", None)
    return found


def text(points: Sequence[Point], found: Line) -> str:
    """The line, and the points that it is drawn through."""
    cells = [["shape", "MB per token", "ms per token", "launches", "host ms"]]
    for point in points:
        launches = "" if point.launches is None else str(point.launches)
        host = "" if point.host_s is None else f"{1000 * point.host_s:.3f}"
        cells.append([point.shape, f"{point.bytes / 1e6:,.1f}", f"{1000 * point.seconds:.3f}", launches, host])
    rate = f"{found.bytes_per_s / 1e9:,.1f} GB/s" if found.bytes_per_s else "no slower for more bytes"
    error = f", {100 * found.largest_error:.1f} % off at most" if len(points) > 2 else ""
    f = points[0].facts
    where = ", ".join(str(each) for each in (f["target"], f["device"] or f["processor"], f["mode"]) if each)
    return f"{where}, {CODEC.name}: fixed_ms {found.fixed_ms:.3f}, {rate}{error}\n\n{aligned(cells)}"


@click.command(cls=Command)
@click.argument("shapes", nargs=-1, type=click.Choice(TEXT_SHAPES))
@click.option("--target", type=click.Choice(["cpu", "cuda"]), help="Where to run.  [default: the best that is there]")
@click.option("--mode", type=click.Choice(["a16", "a8"]), default="a16", show_default=True, help="Type of activations.")
@click.option("-n", "--tokens", type=click.IntRange(1, 4096), default=64, show_default=True, help="Tokens decoded.")
@click.option("-r", "--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True, help="Texts of each shape.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(shapes: tuple[str, ...], target: str | None, mode: str, tokens: int, repetitions: int, as_json: bool) -> None:
    """Measure what a token costs beside the bytes that it reads, by two SHAPES or more."""
    names, points = shapes or MODELS, list[Point]()
    if len(set(names)) < 2:
        raise InputError("a line needs two shapes or more, such as smollm-135m llama-3.2-1b")
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder, progress() as report:
        for i, name in enumerate(names):
            # One file at a time: that of the largest shape takes gigabytes.
            path = Path(folder) / "random.edgeq"
            write_random(path, config_of(name), CODEC)

            def told(share: float, i: int = i, name: str = name) -> None:
                report(i + share, len(names), name)

            points.append(measured(path, name, tokens, repetitions, told, target=target, mode=mode))
            path.unlink()
    found = line(points)
    if as_json:
        click.echo(json.dumps({**asdict(found), "points": [asdict(point) for point in points]}, indent=1))
    else:
        click.echo(text(points, found))


if __name__ == "__main__":
    main()
