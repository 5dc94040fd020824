"""What drafts gain on real text: the same greedy continuation with drafts and without, alternating."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from edgeq.errors import InputError
from edgeq.runtime import Measurement, Model
from edgeq.runtime.speculative.speculator import DraftSource
from edgeq.tools.quality import corpus

PROMPT = 256
"""Tokens of held-out code that are continued."""


@dataclass(frozen=True)
class Drafting:
    """A continuation of `tokens` tokens.

    tokens_per_s, plain_tokens_per_s   medians with drafts and without
    speedup        median of the ratios of neighbouring runs; predicted: the same from c, v and beta
    drafted, accepted   tokens by their position in the draft, of the last run
    c, v, beta     as in edgeq.runtime.stats.Speculation
    """

    draft: DraftSource
    gamma: int | None
    tokens: int
    tokens_per_s: float
    plain_tokens_per_s: float
    speedup: float
    predicted: float
    tokens_per_cycle: float
    drafted: list[int]
    accepted: list[int]
    c: float | None
    v: float | None
    beta: float | None


def measure(
    model: Model, draft: DraftSource, gamma: int | None, tokens: int, repetitions: int, report: Callable[[float, str], None]
) -> Drafting:
    """Continue held-out code `repetitions` times with drafts and without.

    InputError: the model's context is too short for the prompt and `tokens`; `draft` or `gamma` out of range.
    """
    prompt = model.text.encode("".join(corpus.evaluation_code()))[:PROMPT]
    if len(prompt) + tokens > model.context:
        raise InputError(f"{len(prompt)} + {tokens} tokens; the context has {model.context}: pass a smaller -n")

    def run(source: DraftSource, count: int | None) -> Measurement:
        generation = model.generate(prompt, max_tokens=tokens, draft=source, gamma=count)
        list(generation.pieces())
        return generation.measurement

    # Warm-up: the first run of each finds cold caches.
    run("off", None), run(draft, gamma)
    pairs: list[tuple[Measurement, Measurement]] = []
    for i in range(repetitions):
        report(i / repetitions, f"draft {draft}")
        pairs.append((run("off", None), run(draft, gamma)))
    plain, drafted = ([pair[i].decode_rate for pair in pairs] for i in range(2))
    last = pairs[-1][1]
    s = last.speculation
    return Drafting(
        draft=draft,
        gamma=gamma,
        tokens=last.generated_tokens,
        tokens_per_s=statistics.median(drafted),
        plain_tokens_per_s=statistics.median(plain),
        speedup=statistics.median(b / a for a, b in zip(plain, drafted, strict=True)),
        predicted=s.predicted,
        tokens_per_cycle=s.tokens_per_cycle,
        drafted=s.drafted,
        accepted=s.accepted,
        c=s.c,
        v=s.v,
        beta=s.beta,
    )


def cells(lines: list[Drafting]) -> list[list[str]]:
    """The cells of a table, its heading first."""

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    head = ["draft", "γ", "tokens", "tok/s", "plain tok/s", "speed-up", "predicted", "tokens a cycle", "accepted by position"]
    rows = [
        [
            d.draft,
            str(d.gamma or "auto"),
            str(d.tokens),
            f"{d.tokens_per_s:,.2f}",
            f"{d.plain_tokens_per_s:,.2f}",
            f"{d.speedup:.2f}",
            f"{d.predicted:.2f}",
            f"{d.tokens_per_cycle:.2f}",
            " ".join(f"{a}/{n}" for a, n in zip(d.accepted, d.drafted, strict=True) if n),
            *map(shown, (d.c, d.v, d.beta)),
        ]
        for d in lines
    ]
    return [[*head, "c", "v", "β"], *rows]
