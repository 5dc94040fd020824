"""The results of a contest as rows of numbers, and two tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgeq.format.manifest import fused_shapes
from edgeq.network.config import ModelConfig
from edgeq.tools.lab.peers.contest import Entry
from edgeq.tools.measure.alternating import Spread, aligned


@dataclass(frozen=True)
class Row:
    """One competitor with one number of threads; None stands for what it had not measured before it failed.

    decode, prefill      tokens per second
    decode_ratio, prefill_ratio   median of edgeq divided by the median of this row; `against` names the edgeq variant: mode a8
                         (on a GPU a16), the same bits of the head and, where there is one, the same group size
    bytes_per_token      weights and head as stored, without the cache
    weight_bits, head_bits   effective, scales included
    bytes_per_s          bytes_per_token at the median speed; bandwidth_share: of what the machine was measured to read in the
                         same run, None where the weights fit the cache of the processor (in_cache) or nothing was measured
    same_tokens          how many of the first tokens are the same as those of edgeq with the same head
    """

    name: str
    peer: str
    threads: int
    settings: str
    head: int
    decode: Spread | None
    prefill: Spread | None
    against: str | None
    decode_ratio: float | None
    prefill_ratio: float | None
    peak_rss: int | None
    load_s: float | None
    ready_s: float | None
    bytes_per_token: int
    weight_bits: float
    head_bits: float
    bytes_per_s: float | None
    bandwidth_share: float | None
    in_cache: bool
    same_tokens: int | None
    tokens: int
    failure: str | None


def rows(
    config: ModelConfig, entries: Sequence[Entry], prompt: int, bandwidth: Mapping[int, float], cache: int | None
) -> list[Row]:
    """A row for every entry.  `bandwidth` in bytes per second by number of threads, `cache` in bytes."""
    return [_row(config, entry, entries, prompt, bandwidth.get(entry.threads), cache) for entry in entries]


def _row(
    config: ModelConfig, entry: Entry, entries: Sequence[Entry], prompt: int, bandwidth: float | None, cache: int | None
) -> Row:
    weights = sum(n * k for i in range(config.num_hidden_layers) for _, p in fused_shapes(config, i) for n, k in p.values())
    head = config.vocab_size * config.hidden_size
    size = entry.stored.weights + entry.stored.head
    decode, prefill = _speeds(entry, prompt)
    rate = size * decode.median if decode else None
    in_cache = cache is not None and size <= cache
    mine = _opponent(entry, entries)
    my_decode, my_prefill = _speeds(mine, prompt) if mine and entry.variant.peer != "edgeq" else (None, None)
    return Row(
        name=entry.variant.name,
        peer=entry.variant.peer,
        threads=entry.threads,
        settings=entry.settings,
        head=entry.variant.head_bits,
        decode=decode,
        prefill=prefill,
        against=mine.variant.name if mine and my_decode else None,
        decode_ratio=my_decode.median / decode.median if my_decode and decode else None,
        prefill_ratio=my_prefill.median / prefill.median if my_prefill and prefill else None,
        peak_rss=max(entry.peak_rss, default=None),
        load_s=statistics.median(entry.load_s) if entry.load_s else None,
        ready_s=statistics.median(entry.ready_s) if entry.ready_s else None,
        bytes_per_token=size,
        weight_bits=8 * entry.stored.weights / weights,
        head_bits=8 * entry.stored.head / head,
        bytes_per_s=rate,
        bandwidth_share=rate / bandwidth if rate and bandwidth and not in_cache else None,
        in_cache=in_cache,
        same_tokens=_same(entry, mine),
        tokens=len(entry.times[0].tokens) if entry.times else 0,
        failure=entry.failure,
    )


def _speeds(entry: Entry, prompt: int) -> tuple[Spread | None, Spread | None]:
    """Decode and prefill, tokens per second."""
    if not entry.times:
        return None, None
    decode = Spread.of([(len(t.tokens) - 1) / t.decode_s for t in entry.times])
    return decode, Spread.of([prompt / t.prefill_s for t in entry.times])


def _opponent(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The edgeq entry to compare with: same threads and bits of the head, the same group size if there is one; in mode a8, on a
    GPU a16, as the others multiply there.
    """
    own, wanted = entry.variant, (entry.threads, entry.variant.head_bits)
    equal = [e for e in entries if e.variant.peer == "edgeq" and (e.threads, e.variant.head_bits) == wanted and e.times]
    mode = "a16" if own.target == "cuda" else "a8"
    return min(equal, key=lambda e: (e.variant.mode != mode, e.variant.group != own.group), default=None)


def _same(entry: Entry, mine: Entry | None) -> int | None:
    if mine is None or not entry.times:
        return None
    pairs = list(zip(entry.times[0].tokens, mine.times[0].tokens, strict=True))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


Column = tuple[str, Callable[[Row], str]]


def _spread(value: Spread | None) -> str:
    return value.shown() if value else ""


def _times(value: float | None) -> str:
    return f"{value:.2f}×" if value else ""


def _share(row: Row) -> str:
    if row.in_cache:
        return "in cache"
    return f"{100 * row.bandwidth_share:.0f} %" if row.bandwidth_share else ""


MAIN: tuple[Column, ...] = (
    ("", lambda r: r.name),
    ("t", lambda r: str(r.threads)),
    ("decode tok/s", lambda r: _spread(r.decode) if r.failure is None else f"failed: {r.failure}"),
    ("edgeq is", lambda r: _times(r.decode_ratio)),
    ("prefill tok/s", lambda r: _spread(r.prefill)),
    ("edgeq is", lambda r: _times(r.prefill_ratio)),
    ("peak RSS", lambda r: f"{r.peak_rss / 1e6:,.0f} MB" if r.peak_rss else ""),
    ("load", lambda r: f"{r.load_s:.2f} s" if r.load_s is not None else ""),
    ("ready", lambda r: f"{r.ready_s:.2f} s" if r.ready_s is not None else ""),
    ("per token", lambda r: f"{r.bytes_per_token / 1e6:,.1f} MB"),
    ("bits, head", lambda r: f"{r.weight_bits:.2f}, {r.head_bits:.2f}"),
    ("of read", _share),
    ("same tokens", lambda r: f"{r.same_tokens}/{r.tokens}" if r.same_tokens is not None else ""),
)
BY_BYTES: tuple[Column, ...] = (
    ("", lambda r: r.name),
    ("t", lambda r: str(r.threads)),
    ("per token", lambda r: f"{r.bytes_per_token / 1e6:,.1f} MB"),
    ("decode tok/s", lambda r: f"{r.decode.median:,.1f}" if r.decode else ""),
    ("GB/s", lambda r: f"{r.bytes_per_s / 1e9:.2f}" if r.bytes_per_s else ""),
    ("of read", _share),
)


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A markdown table with aligned columns."""
    return aligned([[name for name, _ in columns]] + [[show(row).replace("|", "/") for _, show in columns] for row in rows])
