"""`edgeq fit`: whether a file fits a device, with which context, and between which speeds it will decode."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import click

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.format.records import KvCodec, KvKind
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.network.embedding import check_continues
from edgeq.runtime.session.context_size import DEFAULT_CONTEXT, expected_cache_bytes
from edgeq.system.devices import DeviceSpec, device, needed
from edgeq.targets.rows import PAGE
from edgeq.tools.measure.decode_speed import this_machine_with
from edgeq.tools.measure.report import describe
from edgeq.tools.profile.options import THIS_MACHINE

SHORT = 32
"""Positions of the cache at which the first tokens of a text are decoded."""
SMALL = 2_000
"""Tokens per second above which the time outside of the kernels, 0.1 ms on a laptop, is a large part of a token."""
NO_DOT_PRODUCT = ("neon", "portable")
"""Instruction sets on which arithmetic can be slower than memory."""


@dataclass(frozen=True)
class Fit:
    """What can be expected of a file on a device.

    context           asked for, or what run would choose;  longest_context: that fits, 0: the file alone does not
    needs, has        bytes of memory with that context, and what the device has for it
    bytes_per_token   weights and head;  position_bytes: of the cache, in all layers
    slowest, expected, fastest   tokens per second: at the end of the context with the smallest share of the bandwidth that is
                      known of decode; in the middle of it with the usual share; at the beginning with the largest; on this
                      machine 10 % around what was measured of this file.  None: this version does not run there
    measured          the bandwidth was measured on such a device, or is that of its data sheet
    speed             asked for;  speed_context: positions to which the expected speed is at least that, 0: not even the first
    """

    device: str
    context: int
    longest_context: int
    fits: bool
    needs: int
    has: int
    bytes_per_token: int
    position_bytes: int
    bandwidth: float
    measured: bool
    slowest: float | None
    expected: float | None
    fastest: float | None
    speed: float | None
    speed_context: int | None

    @property
    def fast_enough(self) -> bool:
        return self.speed is None or (self.expected is not None and self.expected >= self.speed)


def fit(model: Path, board: str, context: int | None, speed: float | None, kv: str, as_json: bool) -> None:
    """Print the answer.  Exit code 1: it does not fit, or is slower than `speed`.

    InputError: a context that the model does not take.
    """
    file = ModelFile.open(model)
    check_continues(file)
    target = this_machine_with(file) if board == THIS_MACHINE else device(board)
    found = fitted(file, target, context, speed, kv)
    click.echo(json.dumps(asdict(found), indent=1) if as_json else text(found, file, target))
    if not (found.fits and found.fast_enough):
        raise click.exceptions.Exit(1)


def fitted(file: ModelFile, target: DeviceSpec, context: int | None, speed: float | None, kv: str = "file") -> Fit:
    """What can be expected of `file` on `target`.  InputError: a context that the model does not take."""
    metadata, config = file.metadata, file.metadata.config
    limit = config.max_position_embeddings
    if context is not None and context > limit:
        raise InputError(
            f"context {context} is out of range; this model takes 1 to {limit} positions: pass --context {limit} or less"
        )
    codec = metadata.kv if kv == "file" else KvCodec(cast(KvKind, kv))
    graph = decoder(metadata)
    position = graph.page_bytes(codec) // PAGE
    sizes = metadata.bytes_per_token()
    weights = sizes["weights"] + sizes["head"]

    def needs_for(positions: int) -> int:
        return needed(file.size, expected_cache_bytes(graph, codec, positions))

    fitting = bisect_left(range(1, limit + 1), True, key=lambda positions: needs_for(positions) > target.usable_memory)
    # Less than a page is still a context.
    longest = min(limit, fitting // PAGE * PAGE or fitting)
    chosen = context or max(1, min(limit, DEFAULT_CONTEXT, longest))
    needs = needs_for(chosen)

    def cache(positions: int) -> float:
        return position * config.positions_read(positions)

    def expected(positions: int) -> float:
        return 1 / target.decode_seconds(weights, cache(positions))

    slowest, _ = target.decode_range(weights, cache(chosen))
    _, fastest = target.decode_range(weights, cache(min(SHORT, chosen)))
    reached = None
    if speed is not None and target.supported:
        reached = _longest(lambda positions: expected(positions) >= speed, limit)
    return Fit(
        device=target.name,
        context=chosen,
        longest_context=longest,
        fits=needs <= target.usable_memory,
        needs=needs,
        has=target.usable_memory,
        bytes_per_token=weights,
        position_bytes=position,
        bandwidth=target.usable_bandwidth,
        measured=bool(target.read_bandwidth),
        slowest=slowest if target.supported else None,
        expected=expected((chosen + 1) // 2) if target.supported else None,
        fastest=fastest if target.supported else None,
        speed=speed,
        speed_context=reached,
    )


def _longest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `holds`, which no larger one does once one does not; 0: none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def text(fit: Fit, file: ModelFile, target: DeviceSpec) -> str:
    """The same in words."""
    verdict = "fits in" if fit.fits else "does not fit in"
    lines = [
        describe(file),
        f"{fit.device}: {fit.needs / 1e9:.2f} GB with a context of {fit.context} {verdict} {fit.has / 1e9:.1f} GB",
    ]
    limit = file.metadata.config.max_position_embeddings
    if not fit.longest_context:
        lines.append("the file alone does not fit; convert it with fewer bits: edgeq convert --for says to which")
    else:
        model = " (all that the model takes)" if fit.longest_context == limit else ""
        lines.append(f"longest context that fits: {fit.longest_context}{model}, {fit.position_bytes:,} bytes per position")
    if fit.slowest is None or fit.expected is None or fit.fastest is None:
        return "\n".join([*lines, "this version runs on CPUs only, so no speed is promised there"])
    source = "measured" if fit.measured else "by its data sheet, of which decode reaches 70 to 90 %"
    source = "measured, decode of this file too" if target.decoded else source
    read = f"{fit.bytes_per_token / 1e6:,.1f} MB per token at {fit.bandwidth / 1e9:.1f} GB/s ({source})"
    lines.append(
        f"decode {fit.slowest:,.1f} to {fit.fastest:,.1f} tokens per second, {fit.expected:,.1f} in the middle of the "
        f"context: bounded by reading {read}"
    )
    if fit.fastest > SMALL and not target.decoded:
        lines.append(f"above some {SMALL:,} tokens per second the Python around each token, which is not counted, bounds it")
    if target.isa in NO_DOT_PRODUCT:
        lines.append(f"{target.isa} has no instruction for integer dot products: arithmetic can bound it lower")
    if fit.speed is not None:
        holds = f"expected up to a context of {fit.speed_context}" if fit.speed_context else "not expected at any context"
        lines.append(f"{fit.speed:g} tokens per second: {holds}")
    return "\n".join(lines)
