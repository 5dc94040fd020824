"""The record of one measurement: what `profile`, `bench`, `run` and `chat` print with JSON, and what their tables show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from edgeq.errors import FormatError
from edgeq.tools.measure import gpu
from edgeq.tools.measure.statistics import percentile

KINDS = ("compile", "load", "ttft", "pp", "tg", "image")
SETTINGS = ("target", "isa", "mode", "kv", "threads", "threads_prefill", "batch", "draft")
"""Fields that a run chooses: two records that differ in others are of other files or machines."""
NEEDED = {"mhz": "clocks", "threads": "threads", "context": "context"}
"""Fields without which a number means little, and what they are called where they are missing."""
MIN_SAMPLES = {50: 1, 95: 20, 99: 100}
"""Values without which a percentile would be an invention."""
SHOWN = ("test", "identity", "processor", "load", "cores", *SETTINGS)
"""Fields by which records are compared, or that are shown then."""
MAX_FIELD_CHARACTERS = 200
"""Characters of such a field."""


@dataclass(frozen=True)
class MeasuredTest:
    """One thing that was measured: seconds, with all that they depend on.  docs/profile.md has the fields as a schema.

    kind         one of KINDS;  test: its name, as in "tg128 @ d512";  tokens, depth, batch: as in the test
    facts        of the program, the machine, the file, the settings and the conditions (report.py, facts)
    context      positions of the session
    samples_s    seconds of each repetition
    step_s       tg: seconds of every token of all repetitions, in order; else empty
    bytes_per_s  tg: weights, head and cache that are read, at the median speed;  read_bandwidth: of the machine;
                 bandwidth_share: their ratio
    instrumented_s   the same with a clock around every operation, in runs that alternate with those of the samples: of every
                 token of a tg, of every repetition of anything else
    rss, peak_rss    bytes of memory of the process after the test, and at its peak so far
    joules_per_token  above idle, where a sensor tells
    core_wait    seconds that threads of the process wanted a core and another had it, of all of them together, per second of
                 the samples; None: the system does not tell
    draft        tg: what proposed tokens ("off": none);  tokens_per_run: then, how many a run of the exact mode gave
    """

    kind: str
    test: str
    tokens: int
    depth: int
    batch: int
    context: int
    facts: dict[str, Any]
    samples_s: list[float]
    step_s: list[float] = field(default_factory=list)
    bytes_per_s: float | None = None
    read_bandwidth: float | None = None
    bandwidth_share: float | None = None
    instrumented_s: list[float] = field(default_factory=list)
    rss: int | None = None
    peak_rss: int | None = None
    joules_per_token: float | None = None
    core_wait: float | None = None
    draft: str = "off"
    tokens_per_run: float | None = None

    @property
    def seconds(self) -> list[float]:
        """What the percentiles are of: seconds of every token of a tg, of every repetition of anything else."""
        return self.step_s or self.samples_s

    def percentile(self, p: int) -> float | None:
        """Seconds; None: there are too few values for it."""
        return percentile(self.seconds, p) if len(self.seconds) >= MIN_SAMPLES[p] else None

    @property
    def median(self) -> float:
        """Seconds."""
        return percentile(self.seconds, 50)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition, of all texts together."""
        return [self.batch * self.tokens / seconds for seconds in self.samples_s]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all texts together, at the median repetition; None: it is not about tokens."""
        if self.kind not in ("pp", "tg", "image"):
            return None
        return self.batch * self.tokens / percentile(self.samples_s, 50)

    @property
    def overhead(self) -> float | None:
        """What the clocks around operations added to the median, as a share of it; None: not measured."""
        if not self.instrumented_s:
            return None
        return percentile(self.instrumented_s, 50) / self.median - 1

    @property
    def incomplete(self) -> list[str]:
        """What the record lacks to be understood later."""
        known = {**self.facts, "context": self.context}
        return [name for key, name in NEEDED.items() if not known.get(key)] + gpu.lacking(known)

    def fields(self) -> dict[str, Any]:
        """Every field of the record by its name, those of the facts first."""
        own = {name: value for name, value in asdict(self).items() if name != "facts"}
        derived = {
            "unit": "s",
            "values": len(self.seconds),
            **{f"p{p}": self.percentile(p) for p in MIN_SAMPLES},
            "tokens_per_s": self.tokens_per_s,
            "overhead": self.overhead,
            "incomplete": self.incomplete,
        }
        return {**self.facts, **own, **derived}


DERIVED = ("unit", "values", "p50", "p95", "p99", "tokens_per_s", "overhead", "incomplete")


def measurement(record: dict[str, Any]) -> MeasuredTest:
    """The measurement that `MeasuredTest.fields` described.  FormatError: it is something else."""
    own = {name: record[name] for name in MeasuredTest.__dataclass_fields__ if name in record and name != "facts"}
    facts = {name: value for name, value in record.items() if name not in own and name not in DERIVED}
    try:
        made = MeasuredTest(facts=facts, **own)
    except TypeError:
        raise FormatError("a record of the profile lacks fields; make the profile again with this version") from None
    named = f"the record {str(made.test)[:80]!r} of the profile"
    if not isinstance(made.test, str) or not all(_is_plain(record.get(name)) for name in SHOWN):
        raise FormatError(f"{named} has a setting that is neither a number nor a short line")
    if made.kind not in KINDS or not _are_times(made.samples_s) or not made.samples_s or not _are_times(made.step_s):
        raise FormatError(f"{named} has no times that can be compared")
    if len(made.step_s) % len(made.samples_s):
        raise FormatError(f"{named} has tokens that belong to no repetition")
    return made


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_FIELD_CHARACTERS and value.isprintable()
    return value is None or type(value) in (int, float) and abs(value) < 2**63


def _are_times(values: Any) -> bool:
    return isinstance(values, list) and all(type(x) in (int, float) and 1e-9 < x < 1e9 for x in values)
