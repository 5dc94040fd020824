"""The command `python -m edgeq.tools.lab.peers`; docs/peers.md explains it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeq import targets
from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope
from edgeq.system import machine
from edgeq.tools.cli.entry import Command
from edgeq.tools.cli.params import PixelSize, Several, is_gguf
from edgeq.tools.cli.terminal import note, progress
from edgeq.tools.commands.from_gguf import converted
from edgeq.tools.lab.make_checkpoint import SHAPES
from edgeq.tools.lab.peers import pictures
from edgeq.tools.lab.peers.contest import Contest, Entry, PeerError, process
from edgeq.tools.lab.peers.peer import variants
from edgeq.tools.lab.peers.table import BY_BYTES, MAIN, Row, markdown, rows
from edgeq.tools.measure import gpu
from edgeq.tools.measure.alternating import Spread, aligned, listed

if TYPE_CHECKING:
    from edgeq.targets.cpu.isa.isa import Isa

MAX_THREADS = 1024
EDGE = 28
"""Pixels of a side of what becomes one token."""
MAX_TOKENS = 8192


@dataclass(frozen=True)
class Surroundings:
    """The machine during the measurement.

    read_bandwidth   bytes per second by number of threads, measured before every round
    integer_peak     8-bit operations per second, likewise; of a GPU only the first, by edgeq's process
    gpu              its name and under what it ran (measure/gpu.py), empty where nothing runs on one
    load_before      load average before the first round, load_after after the last: whether something else was running
    """

    processor: str
    cores: int
    last_level_cache: int | None
    read_bandwidth: dict[int, Spread]
    integer_peak: dict[int, Spread]
    gpu: dict[str, float | str | None]
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]


@dataclass
class Limits:
    """Limits of `threads` threads, integers by the instruction set `isa`, measured at every call; nothing where the CPU target
    cannot run."""

    threads: int
    isa: str | None
    read: list[float] = field(default_factory=list)
    integer: list[float] = field(default_factory=list)

    def measure(self) -> None:
        if targets.load("cpu").refusal() is None:
            # Imported here: where this target cannot run, this module cannot be imported.
            from edgeq.targets.cpu import probes

            self.read.append(probes.read_bandwidth(self.threads, refresh=True))
            self.integer.append(probes.integer_peak(instructions(self.isa), self.threads, refresh=True))


def configuration(shape: str) -> ModelConfig:
    """The configuration of the random model."""
    s = SHAPES[shape]
    return ModelConfig(
        model_type="llama",
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.inner,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        rms_norm_eps=1e-5,
        rope=Rope(500000.0),
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )


def header(model: str, prompt: int, steps: int, repetitions: int, where: Surroundings, versions: dict[str, str]) -> str:
    """The lines above the tables: model, machine and versions."""
    cache = f", {where.last_level_cache / 1e6:.0f} MB last-level cache" if where.last_level_cache else ""
    limits = "; ".join(
        f"{n} thread{'s' * (n > 1)}: read {read.shown(1e9, 2)} GB/s"
        + (f", 8-bit integers {where.integer_peak[n].shown(1e12, 2)} TOPS" if n in where.integer_peak else "")
        for n, read in where.read_bandwidth.items()
    )
    gpu_line = [", ".join(f"{name.removeprefix('device_')} {value}" for name, value in where.gpu.items() if value)]
    if where.gpu:
        gpu_line += [f"INCOMPLETE: without {', '.join(missing)}"] if (missing := gpu.lacking(where.gpu)) else []
    loads = " to ".join("/".join(f"{x:.1f}" for x in load) for load in (where.load_before, where.load_after))
    return "\n".join(
        [
            f"{model}, prompt {prompt}, {steps} tokens decoded after it, {repetitions} rounds",
            f"{where.processor}, {where.cores} cores{cache}; {limits or 'nothing measured'}; load average {loads}",
            *(gpu_line if where.gpu else ()),
            ", ".join(f"{peer} {version}" for peer, version in versions.items()),
        ]
    )


def text(head: str, rows: list[Row], left_out: dict[str, str]) -> str:
    """Everything that is printed."""
    settings = {row.name: row.settings for row in rows if row.settings}
    parts = [head, markdown(rows, MAIN), "At each one's own bytes per token:", markdown(rows, BY_BYTES)]
    return "\n\n".join([*parts, *listed("Settings", settings), *listed("Left out", left_out)])


def instructions(isa: str | None) -> Isa:
    """The instruction set of a name, None: the best that this processor has.  UnsupportedError: it cannot run here."""
    # Imported here: where the CPU target cannot run, this module cannot be imported.
    from edgeq.targets.cpu.choose_isa import choose

    return choose(isa)[0]


def numbers(value: str) -> list[int]:
    """Numbers of threads.  InputError: something else."""
    parts = value.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_THREADS for part in parts):
        raise InputError(f"--threads {value!r}: expected numbers from 1 to {MAX_THREADS}, such as 1,2")
    return [int(part) for part in parts]


def chosen(only: str | None, target: str, published: bool) -> list[str]:
    """Names of variants on `target`, of a published model or of the random one, that begin with one of the names in `only`.

    InputError: there is none.
    """
    names = [name for name, variant in variants().items() if (variant.target, variant.published) == (target, published)]
    if not names:
        raise InputError(f"--model: no competitor runs a published file on {target}; choose --target cpu")
    if only is None:
        return names
    wanted = [name for name in names if any(name.startswith(part) for part in only.split(",") if part)]
    if not wanted:
        raise InputError(f"--only {only!r} fits no competitor; choose from {', '.join(names)}")
    return wanted


def see(
    shape: str,
    layers: int | None,
    sizes: Sequence[tuple[int, int]],
    threads: int,
    *,
    rounds: int,
    only: str | None,
    peer_python: str,
    work: Path | None,
    isa: str | None,
) -> None:
    """Measure pictures; prints a table."""
    if SHAPES[shape].tower is None:
        raise InputError(f"--image: a {shape} reads text alone; choose qwen2-vl-2b or qwen2-vl-tiny as --shape")
    if any(width % EDGE or height % EDGE for width, height in sizes):
        raise InputError(f"--image: sides are multiples of {EDGE}, so that no peer resizes")
    wanted = [peer for peer in pictures.PEERS if not only or any(peer.startswith(part) for part in only.split(",") if part)]
    folder = (work or machine.cache_folder() / "peers").resolve()
    before = os.getloadavg()
    with progress() as report:
        contest = pictures.PictureContest(
            folder,
            shape,
            layers,
            sizes,
            process,
            lambda peer: sys.executable if peer == "edgeq" else peer_python,
            report,
            PeerError,
            isa,
        )
        lines = contest.run(wanted, threads, rounds)
    loads = " to ".join("/".join(f"{x:.1f}" for x in load) for load in (before, os.getloadavg()))
    about = f"{shape}, {layers or 'all'} layers, random weights, {rounds} rounds; {machine.cpu().name}, load average {loads}"
    settings = {f"{line.peer} {contest.versions[line.peer]}": line.settings for line in lines if line.settings}
    parts = [about, aligned(pictures.cells(lines)), *listed("Settings", settings), *listed("Left out", contest.left_out)]
    click.echo("\n\n".join(parts))
    note(f"models are kept in {folder}")


@click.command(cls=Command)
@click.option(
    "--shape",
    type=click.Choice(["tiny", "llama-3.2-1b", "llama-3.2-3b", "qwen2-vl-2b", "qwen2-vl-tiny"]),
    help="Shape of the model.  [default: llama-3.2-1b; with --image qwen2-vl-2b]",
)
@click.option(
    "--model",
    "model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.gguf",
    help="A published GGUF file that edgeq and llama.cpp run as it is, instead of a random model.",
)
@click.option(
    "--image",
    "images",
    type=Several(PixelSize()),
    metavar="WxH,WxH",
    help="Measure pictures of so many pixels, multiples of 28, instead of text.",
)
@click.option(
    "--layers", type=click.IntRange(1, 128), help="With --image: layers of decoder and tower.  [default: the shape's]"
)
@click.option(
    "--target", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="What the competitors run on."
)
@click.option(
    "--isa",
    metavar="NAME",
    help="Instruction set of edgeq's kernels on the cpu, such as avx2, beside runtimes built for it.  "
    "[default: the fastest here]",
)
@click.option("-t", "--threads", metavar="N,N", help="Numbers of threads, such as 1,2.  [default: all cores]")
@click.option(
    "-p", "--prompt", type=click.IntRange(1, MAX_TOKENS), default=512, show_default=True, help="Tokens of the prompt."
)
@click.option(
    "-n", "--tokens", type=click.IntRange(1, MAX_TOKENS), default=32, show_default=True, help="Tokens decoded one by one."
)
@click.option("-r", "--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True, help="Rounds.")
@click.option(
    "--only", metavar="NAME,NAME", help="Only competitors whose names begin so, such as edgeq-a8,llama.cpp.  [default: all]"
)
@click.option(
    "--peer-python", default=sys.executable, metavar="PATH", help="Python that has the peers installed.  [default: this one]"
)
@click.option(
    "--work", type=click.Path(path_type=Path), help="Folder in which models are kept.  [default: edgeq's cache folder]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    *,
    shape: str | None,
    model: Path | None,
    images: tuple[tuple[int, int], ...] | None,
    layers: int | None,
    target: str,
    isa: str | None,
    threads: str | None,
    prompt: int,
    tokens: int,
    repetitions: int,
    only: str | None,
    peer_python: str,
    work: Path | None,
    as_json: bool,
) -> None:
    """Measure edgeq and the other runtimes that are installed, alternating, on the same random or published model."""
    if model and (shape or images or layers):
        raise InputError("--model: leave out --shape, --image and --layers; the file has a shape of its own")
    if model and not is_gguf(model):
        raise InputError(f"--model {model}: not a GGUF file, which is what edgeq and llama.cpp both read")
    if isa:
        if target != "cpu":
            raise InputError("--isa: of --target cpu alone; leave it out")
        instructions(isa)
    if images:
        if as_json:
            raise InputError("--json is not there with --image; leave it out")
        count = numbers(threads or str(machine.cpu().cores))[0]
        python, shape = peer_python, shape or "qwen2-vl-2b"
        see(shape, layers, images, count, rounds=repetitions, only=only, peer_python=python, work=work, isa=isa)
        return
    shape = shape or "llama-3.2-1b"
    if SHAPES[shape].tower or layers:
        raise InputError(f"--shape {shape}, --layers: a model that sees is measured with --image")
    try:
        # On a GPU the threads of the host only launch.
        counts = numbers(threads or str(machine.cpu().cores)) if target == "cpu" else [1]
        names = chosen(only, target, published=model is not None)
        config = ModelFile.open(converted(model)).metadata.config if model else configuration(shape)
        folder = (work or machine.cache_folder() / "peers").resolve()
        with progress() as report:
            contest = Contest(config, folder, peer_python, prompt, tokens, report, model.resolve() if model else None, isa)
            found = contest.find(names)
            sizes = contest.build(found)
            before, entries = os.getloadavg(), list[Entry]()
            limits = {n: Limits(n, isa) for n in counts}
            for n in counts:
                here = [Entry(variant, n, sizes[variant.name]) for variant in found if variant.name in sizes]
                contest.compete(here, repetitions, limits[n].measure if target == "cpu" else lambda: None)
                entries += here
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
    cpu, cache = machine.cpu(), machine.last_level_cache()
    for entry in entries:
        limits[entry.threads].read += entry.read_bandwidth
    bandwidth = {n: Spread.of(limit.read) for n, limit in limits.items() if limit.read}
    peak = {n: Spread.of(limit.integer) for n, limit in limits.items() if limit.integer}
    cache = cache if target == "cpu" else None
    gpu_facts = gpu.only() if target == "cuda" else {}
    where = Surroundings(cpu.name, cpu.cores, cache, bandwidth, peak, gpu_facts, before, os.getloadavg())
    lines = rows(config, entries, prompt, {n: read.median for n, read in bandwidth.items()}, cache)
    about_model = model.name if model else f"{shape}, random weights"
    if as_json:
        settings = {"model": about_model, "prompt": prompt, "tokens": tokens, "repetitions": repetitions}
        about = {**settings, "machine": asdict(where), "versions": contest.versions, "left_out": contest.left_out}
        click.echo(json.dumps({**about, "rows": [asdict(line) for line in lines]}, indent=1))
    else:
        click.echo(text(header(about_model, prompt, tokens, repetitions, where, contest.versions), lines, contest.left_out))
    note(f"models are kept in {folder}")


if __name__ == "__main__":
    main()
