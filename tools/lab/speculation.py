"""Whether drafts change a text, and what they gain: `python -m edgeq.tools.lab.speculation identity|rows|edit ...`.

identity   greedy text with drafts against plain text, token by token, over many prompts; resumes where it stopped
rows       what a run of several token rows costs: a check of drafts, or a batch of texts
edit       a text that copies most of its prompt, at the cost of a real model: every token is taken from the edited text
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.runtime import Batch, Model, Sampling
from edgeq.runtime.decode import PlainStepper, Stepper, Stream
from edgeq.runtime.sampling import Candidates, Sampler, certain, distribution
from edgeq.runtime.session.runs import BatchItem, run_together
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.runtime.stats import MAX_DRAFT, Speculation
from edgeq.system.whole_file import write_whole
from edgeq.tools.cli.entry import Commands
from edgeq.tools.cli.options import DRAFTS, JSON, MODES
from edgeq.tools.cli.params import Count, EdgeqFile, Gamma, OneOf, Several
from edgeq.tools.cli.terminal import Report, progress
from edgeq.tools.quality import corpus

PROMPT = 48
"""Tokens of a prompt of the identity grid."""
TIE = 1e-2
"""Difference of log-probabilities below which two tokens count as equally probable."""


@dataclass(frozen=True)
class Cell:
    """A setting of the grid and its results: `different` texts, `ties` of them parting at equally probable tokens."""

    file: str
    draft: DraftSource
    gamma: int | None
    batch: int
    prompts: int
    tokens: int
    different: int = 0
    ties: int = 0
    tokens_per_cycle: float = 0.0
    acceptance: float | None = None


def prompts_of(model: Model, count: int) -> list[list[int]]:
    """Evenly spaced pieces of held-out code and prose."""
    documents = [*corpus.evaluation_code(), *corpus.evaluation_docs()]
    tokens = [token for text in documents for token in model.text.encode(text)]
    if len(tokens) < count * PROMPT:
        raise InputError(f"{count} prompts of {PROMPT} tokens; the text has {len(tokens)} tokens: ask for fewer")
    step = len(tokens) // count
    return [tokens[i * step : i * step + PROMPT] for i in range(count)]


def identity(files: Sequence[Path], cells: Sequence[Cell], work: Path, options: dict[str, Any], report: Report) -> list[Cell]:
    """The cells with their results, each kept in `work` as soon as it is known.  Plain texts are computed once per file."""
    work.mkdir(parents=True, exist_ok=True)
    results: list[Cell] = []
    for file in files:
        here = [cell for cell in cells if cell.file == file.name]
        loaded: Model | None = None
        for cell in here:
            report(len(results), len(cells), f"{file.name} {cell.draft} {cell.gamma or 'auto'} batch {cell.batch}")
            settings = json.dumps([str(file), file.stat().st_mtime_ns, asdict(cell), sorted(options.items())])
            kept = work / f"{hashlib.sha256(settings.encode()).hexdigest()[:16]}.json"
            if not kept.exists():
                if loaded is None:
                    most = max(c.batch * ((c.gamma or MAX_DRAFT) + 1) for c in here)
                    loaded = Model.load(file, max_logits=most, **options)
                    plain = texts(loaded, Cell(file.name, "off", None, 1, cell.prompts, cell.tokens), report)[0]
                write_whole(kept, json.dumps(asdict(compared(loaded, cell, plain, report))))
            results.append(Cell(**json.loads(kept.read_text(encoding="utf-8"))))
    return results


def texts(model: Model, cell: Cell, report: Report) -> tuple[list[list[int]], Speculation]:
    """Greedy tokens after every prompt, and the statistics of the drafts."""
    batch = Batch(model, cell.batch, max_tokens=cell.tokens, draft=cell.draft, gamma=cell.gamma)
    done: dict[int, list[int]] = {}
    for answer in batch.run(prompts_of(model, cell.prompts)):
        done[answer.index] = answer.tokens
        report(len(done), cell.prompts, f"{cell.file} {cell.draft} {cell.gamma or 'auto'} batch {cell.batch}")
    return [done[i] for i in range(cell.prompts)], batch.measurement.speculation


def compared(model: Model, cell: Cell, plain: list[list[int]], report: Report) -> Cell:
    """The cell with its results against the texts without drafts."""
    drafted, speculation = texts(model, cell, report)
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b]
    prompts = prompts_of(model, cell.prompts)
    ties = sum(is_tie(model, prompts[i], a, b) for i, a, b in pairs)
    found = {"different": len(pairs), "ties": ties, "tokens_per_cycle": speculation.tokens_per_cycle}
    return Cell(**{**asdict(cell), **found, "acceptance": speculation.acceptance})


def is_tie(model: Model, prompt: list[int], a: list[int], b: list[int]) -> bool:
    """Whether the two tokens at which the texts part are equally probable."""
    at = next(i for i, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y)
    p = np.log(distribution(model.session().prefill(prompt + a[:at]), Sampling(temperature=1.0)))
    return at < min(len(a), len(b)) and abs(float(p[a[at]] - p[b[at]])) < TIE


def identity_table(cells: Sequence[Cell]) -> str:
    """A markdown table, one line per cell."""
    head = ("file", "draft", "gamma", "batch", "texts", "different", "of them ties", "tokens a cycle", "accepted")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for c in cells:
        accepted = "" if c.acceptance is None else f"{100 * c.acceptance:.0f} %"
        found = (c.prompts, c.different, c.ties, f"{c.tokens_per_cycle:.2f}", accepted)
        lines.append("| " + " | ".join(map(str, (c.file, c.draft, c.gamma or "auto", c.batch, *found))) + " |")
    return "\n".join(lines)


def row_costs(model: Model, counts: Sequence[int], depth: int, repetitions: int, report: Report) -> dict[str, Any]:
    """Milliseconds of runs of 1 and of `counts` rows of one session after `depth` tokens, alternating: medians and ratios."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, depth + max(counts)).tolist()
    session = model.session()
    session.prefill(tokens[:depth])
    seconds: dict[int, list[float]] = {n: [] for n in (1, *counts)}
    for i in range(repetitions + 1):
        report(i, repetitions + 1, "rows")
        for n in seconds:
            started = perf_counter()
            run_together([BatchItem(session, tokens[depth : depth + n], range(n))])
            # The first run reads pages of the file and touches buffers for the first time.
            if i:
                seconds[n].append(perf_counter() - started)
            session.rewind(depth)
    one = statistics.median(seconds[1])
    rows = [{"rows": n, "ms": 1000 * statistics.median(s), "ratio": statistics.median(s) / one} for n, s in seconds.items()]
    return {"depth": depth, "repetitions": repetitions, "runs_on": model.description, "rows": rows}


class Replay(Sampler):
    """Draws the tokens of a given text, at the cost of a greedy sampler."""

    def __init__(self, prompt: int, text: Sequence[int]) -> None:
        super().__init__(Sampling())
        self._prompt, self._text = prompt, text

    def candidates(self, logits: NDArray[np.float32], history: Sequence[int]) -> Candidates:
        super().candidates(logits, history)
        return certain(self._text[len(history) - self._prompt])


def edit_task() -> tuple[str, str]:
    """A prompt that shows a function and asks to rename a variable, and the function after that."""
    source = inspect.getsource(textwrap.TextWrapper._wrap_chunks)
    task = f"Rename cur_line to current in this function:\n\n{source}\nThe new function:\n\n"
    return task, source.replace("cur_line", "current")


def edit(model: Model, draft: DraftSource, gamma: int | None, tokens: int, repetitions: int, report: Report) -> dict[str, Any]:
    """Tokens per second of the first `tokens` of the edited text, plain and with drafts, alternating."""
    task, wanted = edit_task()
    prompt, text = model.text.encode(task), model.text.encode(wanted)[:tokens]
    seconds: dict[str, list[float]] = {"plain": [], "drafts": []}
    speculation = Speculation()
    for i in range(repetitions):
        speculator = model.speculator(draft, gamma)
        assert speculator is not None
        speculation = speculator.statistics
        for name, stepper in (("plain", PlainStepper()), ("drafts", speculator)):
            report(2 * i + (name == "drafts"), 2 * repetitions, name)
            stream = Stream(model.session(), Replay(len(prompt), text), list(prompt))
            stream.session.prefill(prompt)
            stream.tokens.append(text[0])
            seconds[name].append(sum(cycles(stepper, stream, len(prompt) + len(text))))
            assert stream.tokens[len(prompt) :] == text
    plain, drafts = (statistics.median(s) for s in seconds.values())
    return {
        "prompt_tokens": len(prompt),
        "tokens": len(text),
        "plain_tokens_per_s": (len(text) - 1) / plain,
        "tokens_per_s": (len(text) - 1) / drafts,
        "speedup": statistics.median(a / b for a, b in zip(seconds["plain"], seconds["drafts"], strict=True)),
        "runs_on": model.description,
        "speculation": asdict(speculation) | {"tokens_per_cycle": speculation.tokens_per_cycle},
    }


def cycles(stepper: Stepper, stream: Stream, length: int) -> Iterator[float]:
    """Seconds of every cycle until the stream has `length` tokens."""
    while len(stream.tokens) < length:
        started = perf_counter()
        stepper.step([stream], [length - len(stream.tokens)])
        yield perf_counter() - started


MODE = click.option("--mode", type=OneOf(*MODES), default="a16", show_default=True, help="Mode of the exact runs.")
THREADS = click.option("-t", "--threads", type=click.IntRange(0), default=0, help="Threads; 0: as many as decode fastest here.")


@click.group(cls=Commands)
def main() -> None:
    """Whether drafts change a text, and what they gain."""


@main.command("identity")
@click.argument("work", type=click.Path(path_type=Path))
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--draft",
    "drafts",
    type=Several(OneOf(*DRAFTS)),
    metavar="NAME,NAME",
    default="qspec,lookup",
    show_default=True,
    help="Sources of drafts, as in edgeq run.",
)
@click.option(
    "--gamma",
    "gammas",
    type=Several(Gamma()),
    metavar="N,auto",
    default="1,2,3,4,5,6,7,auto",
    show_default=True,
    help="Draft lengths in tokens.",
)
@click.option(
    "--batch", "batches", type=Several(Count(1)), metavar="N,N", default="1,8", show_default=True, help="Texts at once."
)
@click.option("--prompts", type=click.IntRange(1), default=200, show_default=True, help="Number of prompts.")
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens generated after each prompt.")
@JSON
@MODE
@THREADS
def identity_command(
    work: Path, files: tuple[Path, ...], *, drafts: tuple[DraftSource, ...], gammas: tuple[int | None, ...],
    batches: tuple[int, ...], prompts: int, tokens: int, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Compare greedy texts of every setting with the plain ones; results are kept in WORK."""
    cells = [
        Cell(file.name, draft, gamma, batch, prompts, tokens)
        for file in files
        for draft in drafts
        for gamma in gammas
        for batch in batches
    ]
    with progress() as report:
        results = identity(files, cells, work, options, report)
    click.echo(json.dumps([asdict(cell) for cell in results], indent=1) if as_json else identity_table(results))


@main.command("rows")
@click.argument("model", metavar="FILE", type=EdgeqFile())
@click.option(
    "--counts",
    type=Several(Count(1)),
    metavar="N,N",
    default="2,3,4,5,8,16,32",
    show_default=True,
    help="Token rows of a run.",
)
@click.option("-d", "--depth", type=click.IntRange(1), default=128, show_default=True, help="Tokens already in the cache.")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=20, show_default=True, help="Timed runs of each count.")
@JSON
@MODE
@THREADS
def rows_command(model: Path, counts: tuple[int, ...], depth: int, repetitions: int, as_json: bool, **options: Any) -> None:
    """Time runs of several token rows against a run of one."""
    loaded = Model.load(model, max_logits=max(counts), context=depth + max(counts), **options)
    with progress() as report:
        result = row_costs(loaded, counts, depth, repetitions, report)
    lines = ["| rows | ms | of one row |", "|---|---|---|"]
    lines += [f"| {row['rows']} | {row['ms']:.2f} | {row['ratio']:.2f} |" for row in result["rows"]]
    click.echo(json.dumps(result, indent=1) if as_json else "\n".join([*lines, "", result["runs_on"]]))


@main.command("edit")
@click.argument("model", metavar="FILE", type=EdgeqFile())
@click.option("--draft", type=OneOf(*DRAFTS), default="lookup", show_default=True, help="Source of drafts, as in edgeq run.")
@click.option(
    "--gamma",
    type=click.IntRange(1, MAX_DRAFT),
    help="Draft length in tokens.  [default: the length with the best measured speed-up]",
)
@click.option("-n", "--tokens", type=click.IntRange(2), default=256, show_default=True, help="Tokens of the edited text.")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True, help="Timed runs of each kind.")
@JSON
@MODE
@THREADS
def edit_command(
    model: Path, draft: DraftSource, gamma: int | None, tokens: int, repetitions: int, as_json: bool, **options: Any
) -> None:
    """Time a text that copies most of its prompt, with drafts and without."""
    loaded = Model.load(model, **options)
    with progress() as report:
        result = edit(loaded, draft, gamma, tokens, repetitions, report)
    cycle = result["speculation"]["tokens_per_cycle"]
    line = (
        f"{result['tokens']} tokens: {result['plain_tokens_per_s']:.1f} tok/s plain, {result['tokens_per_s']:.1f} with drafts, "
        f"{result['speedup']:.2f} times as fast ({cycle:.2f} tokens a cycle); {result['runs_on']}"
    )
    click.echo(json.dumps(result, indent=1) if as_json else line)


if __name__ == "__main__":
    main()
