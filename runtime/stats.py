"""What a generation cost: one record for the command line, the benchmark and the profiler."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from edgeq.pictures.prompt import Prompt

MAX_DRAFT = 7
"""QSpec (arXiv 2410.11305, section 4) tests drafts of 2 to 7 tokens."""


@dataclass
class Speculation:
    """What drafting did so far.

    cycles       runs of the exact mode after the prompt, with drafts or without; tokens: what they gave
    draft_steps  runs in the draft's mode
    drafted, accepted   tokens, by their position in the draft
    c, v, beta   cost of a draft step and of a verification as parts of a plain step, and acceptance, as last measured
    predicted    mean over the cycles of the predicted speed-up
    """

    cycles: int = 0
    tokens: int = 0
    draft_steps: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    c: float | None = None
    v: float | None = None
    beta: float | None = None
    predicted: float = 1.0

    @property
    def runs(self) -> int:
        """Runs of the program, in either mode."""
        return self.cycles + self.draft_steps

    @property
    def tokens_per_cycle(self) -> float:
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were accepted; None: none were drafted."""
        return sum(self.accepted) / sum(self.drafted) if any(self.drafted) else None


@dataclass
class Measurement:
    """Seconds, tokens and bytes of one generation; filled while it runs.

    prompt_tokens        tokens of the prompt, of which cached_tokens were in the cache already
    images               pictures of the prompt, visual_tokens: theirs, in prompt_tokens too
    generated_tokens     tokens drawn, a stop token included
    load_s               opening the file and compiling
    ttft_s               from the call to the first token (TTFT)
    read_s               reading pictures, which can be before the call
    vision_s             running the vision tower
    prefill_s            of that, running the prompt without the tower
    decode_s             running and drawing the tokens after the first
    decode_steps         runs that made them, drafts included: one per token where nothing is drafted
    decode_tokens        what those runs gave
    token_s              seconds of each of those tokens; the tokens that a draft gave at once share its time
    context_positions    cache positions read by those runs, mean over the layers (a sliding window reads fewer)
    step_bytes           weights and head read by a run of one row
    position_bytes       cache bytes of a position over all layers
    speculation          what drafting did
    requantize_s         requantizing the weights from the masters; not part of prefill_s and decode_s
    requantized_tokens   tokens that they were requantized for; 0: the file's own weights were used
    copy_bytes           of the requantized weights
    anonymous_bytes, peak_bytes   of the process afterwards: memory that is not mapped from a file, and its peak resident size
    """

    @classmethod
    def of(cls, prompt: Prompt, load_s: float, step_bytes: int, position_bytes: int, speculation: Speculation) -> Measurement:
        """Before anything has run."""
        return cls(
            load_s,
            step_bytes,
            position_bytes,
            len(prompt.tokens),
            images=sum(picture.whole for picture in prompt.pictures),
            visual_tokens=prompt.visual_tokens,
            read_s=sum(picture.read_s for picture in prompt.pictures),
            speculation=speculation,
        )

    load_s: float
    step_bytes: int
    position_bytes: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    visual_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    read_s: float = 0.0
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    token_s: list[float] = field(default_factory=list)
    context_positions: float = 0.0
    speculation: Speculation = field(default_factory=Speculation)
    requantize_s: float = 0.0
    requantized_tokens: int = 0
    copy_bytes: int = 0
    anonymous_bytes: int = 0
    peak_bytes: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens run per second; those found in the cache do not count."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_s)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first; its inverse is the time per output token (TPOT)."""
        return _rate(self.decode_tokens, self.decode_s)

    @property
    def decode_bytes(self) -> float:
        """Bytes that had to be read to decode: weights and head once a step, and the cache."""
        return self.decode_steps * self.step_bytes + self.context_positions * self.position_bytes

    @property
    def decode_bytes_per_s(self) -> float:
        return _rate(self.decode_bytes, self.decode_s)

    def as_dict(self) -> dict[str, float]:
        """Fields and rates, for JSON, without the times of single tokens."""
        rates = ("prefill_rate", "decode_rate", "decode_bytes", "decode_bytes_per_s")
        own = {name: value for name, value in asdict(self).items() if name != "token_s"}
        return {**own, **{name: getattr(self, name) for name in rates}}


@dataclass
class StepRecord:
    """The last step: its seconds, rows of prompts, and tokens of texts that were already decoding."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    decode_tokens: int = 0


@dataclass
class Totals:
    """Counts since the start.  `recomputed`: prompt rows of texts that had made room."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
