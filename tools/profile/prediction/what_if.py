"""What would change the speed of decode, from the table of operations: other bits, other threads, another board.

With other threads, an operation takes `least` seconds by the limits of the machine and the rest beyond that.  Other limits
change `least`; whether they change the rest in proportion or not at all is not known, so both are worked out, and expected is a
mean of the two that was measured (IN_PROPORTION).  With other bits, products take as many times as long as was measured here
(width_cost.py).  Time outside of operations stays as it is.  For another board the prediction is that of `edgeq fit`, which
knows of its memory alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgeq.errors import InputError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.metadata import Metadata
from edgeq.format.records import LinearSpec, Mode
from edgeq.system import machine
from edgeq.system.devices import MEASURED_SHARES, device
from edgeq.tools.measure.report import in_decoder
from edgeq.tools.profile.limits import MachineLimits
from edgeq.tools.profile.options import Change
from edgeq.tools.profile.prediction.fit import fitted
from edgeq.tools.profile.prediction.width_cost import WidthCost
from edgeq.tools.profile.work import Work

Document = dict[str, Any]
LimitsOf = Callable[[int, Mode], MachineLimits | None]
"""The limits of this machine for decode with so many threads in a mode; None: the target measures none."""
IN_PROPORTION = 0.75
"""The share of the first of the two in the mean, of their logarithms.  Measured at the 1B shape, see docs/profile.md."""


@dataclass(frozen=True)
class SpeedPrediction:
    """Tokens per second of a test now, and what is expected after the change, between `low` and `high`.

    measured   of the same profile, where it has a test like that;  error: of what was expected against it
    """

    change: str
    test: str
    threads: int
    mode: str
    kv: str
    now: float
    expected: float
    low: float
    high: float
    measured: float | None = None
    error: float | None = None


def predictions(
    document: Document, changes: tuple[Change, ...], file: ModelFile, limits: LimitsOf, width_cost: WidthCost
) -> Iterator[SpeedPrediction]:
    """Predictions for every test that decodes one text.

    InputError: the limits of the machine are not known, or a board that this version does not run on.
    """
    tests = [
        (record, operations)
        for record in document["measurements"]
        for operations in document["operations"]
        if record["kind"] == "tg" and record["batch"] == 1 and record["draft"] == "off" and _same(record, operations)
    ]
    for change in changes:
        for record, operations in tests:
            if change == Change(threads=record["threads"]):
                continue
            if change.board:
                made = _board(change, record, file)
            else:
                made = _here(change, record, operations, file.metadata, limits, width_cost)
            yield _checked(made, change, document)


def check(change: Change, target: str | None) -> None:
    """Before anything is measured.  InputError: what no prediction can be made of."""
    cores = machine.cpu().cores
    if change.board is not None and not device(change.board).supported:
        raise InputError(f"--what-if board={change.board}: this version runs on CPUs only, so no speed is known there")
    if change.threads is not None and change.threads > cores:
        raise InputError(f"--what-if threads={change.threads}: this machine has {cores} cores; give at most {cores}")
    if change.board is None and target not in (None, "cpu"):
        raise InputError(f"--what-if {change} needs the limits of the machine, which are not measured for --target {target}")


def _same(record: Document, operations: Document) -> bool:
    return all(record[key] == operations[key] for key in ("test", "threads", "mode", "kv"))


def _made(change: Change, record: Document, kept: float, scaled: float) -> SpeedPrediction:
    """Seconds of a token where the rest of an operation's time stays, and where it changes in proportion."""
    low, high = sorted((1 / kept, 1 / scaled))
    expected = kept ** (IN_PROPORTION - 1) * scaled**-IN_PROPORTION
    settings = (record["test"], record["threads"], record["mode"], record["kv"])
    return SpeedPrediction(str(change), *settings, 1 / record["p50"], expected, low, high)


def _here(
    change: Change, record: Document, operations: Document, metadata: Metadata, limits: LimitsOf, width_cost: WidthCost
) -> SpeedPrediction:
    threads, mode = change.threads or record["threads"], record["mode"]
    now, then = limits(record["threads"], mode), limits(threads, mode)
    if now is None or then is None:
        raise InputError("--what-if needs the limits of the machine, which are measured for the target cpu only")
    widths = _widths(metadata, change.bits, lambda codec, bits: width_cost(codec, bits, threads, mode))
    kept = scaled = 0.0
    for line in operations["lines"]:
        work = Work(line["bytes"], line["macs"])
        before, after = now.least_seconds(work), then.least_seconds(work)
        ratio, width = after / before if before else 1.0, widths.get((line["layer"], line["name"]), 1.0)
        # Quicker than the limit is what comes from a cache: then it is not the limit that it waits for.
        least = before if before <= line["seconds"] else 0.0
        kept += width * (line["seconds"] - least + least * ratio)
        scaled += width * line["seconds"] * ratio
    # The table is of the quicker tokens, and with clocks around operations.
    factor = record["p50"] / operations["wall"]
    made = _made(change, record, factor * (kept + operations["bubble"]), factor * (scaled + operations["bubble"]))
    if change.bits is None:
        return made
    return replace(made, low=MEASURED_SHARES[0] * made.low, high=MEASURED_SHARES[1] * made.high)


def _widths(metadata: Metadata, bits: int | None, cost: Callable[[Codec, int], float]) -> dict[tuple[int, str], float]:
    """How many times as long each operation of the decoder with weights takes with other bits, by layer and name."""
    if bits is None:
        return {}
    now: dict[tuple[int, str], float] = defaultdict(float)
    then: dict[tuple[int, str], float] = defaultdict(float)
    for name, linear in metadata.linears.items():
        if in_decoder(name):
            _, layer, *owner, part = name.split(".")
            # The experts of a layer are one operation.
            key = int(layer), "experts" if "experts" in owner else part
            for weight in linear.weights:
                size = weight.codec.nbytes(weight.rows, weight.columns)
                now[key] += size
                then[key] += size * (cost(weight.codec, bits) if weight.codec.bits else 1.0)
    return {key: then[key] / now[key] for key in now}


def _saved(linear: LinearSpec, bits: int | None) -> float:
    """Bytes that the integers of a linear layer take less with other bits."""
    blocks = [weight for weight in linear.weights if bits is not None and weight.codec.bits]
    return sum(weight.rows * weight.columns * (weight.codec.bits - (bits or 0)) / 8 for weight in blocks)


def _board(change: Change, record: Document, file: ModelFile) -> SpeedPrediction:
    assert change.board is not None
    found = fitted(file, device(change.board), max(1, record["depth"] + record["tokens"]), None, record["kv"])
    if found.slowest is None or found.expected is None or found.fastest is None:
        raise InputError(f"this version runs on CPUs only: no speed of {change.board} is known")
    config = file.metadata.config
    # A token reads some of the experts.
    used = config.num_experts_per_tok / (config.num_experts or 1)
    saved = sum(
        _saved(linear, change.bits) * (used if ".experts." in name else 1)
        for name, linear in file.metadata.linears.items()
        if in_decoder(name)
    )
    read = found.bytes_per_token + found.position_bytes * config.positions_read(found.context)
    gain = read / (read - saved)
    made = _made(change, record, 1 / (gain * found.slowest), 1 / (gain * found.fastest))
    # The middle of a short context can be earlier than what counts as its beginning.
    return replace(made, expected=min(max(gain * found.expected, made.low), made.high))


def _checked(made: SpeedPrediction, change: Change, document: Document) -> SpeedPrediction:
    """With what the same profile measured with so many threads, where nothing else is to change."""
    if change != Change(threads=change.threads):
        return made
    wanted = {**asdict(made), "threads": change.threads}
    for record in document["measurements"]:
        if record["kind"] == "tg" and record["batch"] == 1 and _same(record, wanted):
            return replace(made, measured=1 / record["p50"], error=made.expected * record["p50"] - 1)
    return made
