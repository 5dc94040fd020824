"""Options of `edgeq profile` and `edgeq fit`; imported with the command line, so nothing heavy."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgeq.system.devices import DEVICES
from edgeq.tools.cli.help_sections import decorated, section
from edgeq.tools.cli.options import (
    BENCH_TESTS,
    CACHES,
    DRAFTS,
    IMAGE_TOKENS,
    JSON,
    MODEL,
    MODES,
    TARGETS,
    TRUST_KERNELS,
    drafts,
    execution,
    tests,
    trusting,
)
from edgeq.tools.cli.params import Amount, Count, EdgeqFile, Gamma, OneOf, Several, Threads, number

output = section("Output")
FORMATS = ("md", "json", "csv", "html", "trace")

THIS_MACHINE = "this-machine"
comparison = section("Comparison (nothing is measured)")


class Share(click.ParamType):  # type: ignore[type-arg]
    """A share of 1, written in percent: 5% or 5."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        share = Amount().convert(str(value).removesuffix("%").strip(), param, ctx)
        return share / 100


class Board(OneOf):
    """A device by name; a name that is nearly one is suggested."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = difflib.get_close_matches(str(value).casefold(), self.choices, 3, 0.5)
            if near:
                self.fail(f"{value!r} is not known; did you mean {' or '.join(near)}? edgeq devices lists all", param, ctx)
            raise error


@dataclass(frozen=True)
class Change:
    """What is to be different; None: as it is.  bits: of the decoder's weights, with scales and head as they are."""

    bits: int | None = None
    threads: int | None = None
    board: str | None = None

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in vars(self).items() if value is not None)


class WhatIf(click.ParamType):  # type: ignore[type-arg]
    """bits=N,threads=N,board=NAME: some of them."""

    name = "change"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Change:
        found: dict[str, Any] = {}
        for part in str(value).split(","):
            key, equals, given = part.strip().partition("=")
            if key not in vars(Change()) or not equals or key in found:
                self.fail(f"{part!r}: expected bits=N, threads=N or board=NAME, each once", param, ctx)
            found[key] = Board(*DEVICES).convert(given, param, ctx) if key == "board" else self._count(key, given, param, ctx)
        if "board" in found and "threads" in found:
            self.fail("threads and board exclude each other: the threads of another board are not known", param, ctx)
        return Change(**found)

    def _count(self, key: str, given: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        low, high = (2, 8) if key == "bits" else (1, 1024)
        count = number(given, high)
        if count is None or count < low:
            self.fail(f"{key}={given}: expected a number from {low} to {high}", param, ctx)
        return count


FIT_OPTIONS = decorated(
    MODEL,
    click.option(
        "--for",
        "board",
        type=Board(THIS_MACHINE, *DEVICES),
        required=True,
        metavar="DEVICE",
        help="The device; edgeq devices lists them.",
    ),
    click.option("-c", "--context", type=Count(1), metavar="N", help="Positions of the cache.  [default: as run chooses them]"),
    click.option("--speed", type=Amount(), metavar="TOK_S", help="Tokens per second that are wanted."),
    click.option("--kv", type=OneOf(*CACHES), default="file", show_default=True, help="Type of the cached keys and values."),
    JSON,
)
PROFILE_OPTIONS = decorated(
    click.argument("model", metavar="[FILE]", required=False, type=EdgeqFile()),
    BENCH_TESTS,
    execution(
        "-t",
        "--threads",
        type=Several(Threads()),
        metavar="N,N",
        default="auto",
        show_default=True,
        help="Threads; auto: as many as were measured to decode fastest on this machine.",
    ),
    execution(
        "--threads-prefill",
        type=Threads(),
        metavar="auto|N",
        default="auto",
        show_default=True,
        help="Threads while a prompt is read; auto: as -t, or one for each fast core.",
    ),
    execution(
        "--mode",
        "modes",
        type=Several(OneOf(*MODES)),
        metavar="MODE,MODE",
        help="Precision of activations: a16, a8 or a4.  [default: the mode that the file records]",
    ),
    execution(
        "--kv",
        "caches",
        type=Several(OneOf(*CACHES)),
        metavar="TYPE,TYPE",
        default="file",
        show_default=True,
        help="Type of the cached keys and values: file, f16, int8 or int4.",
    ),
    execution("--target", type=OneOf(*TARGETS), help="cuda, cpu or reference.  [default: the first of them that can run here]"),
    execution(
        "--isa",
        metavar="NAME",
        help="Instruction set, or architecture of GPU kernels; see edgeq devices.  [default: the best]",
    ),
    TRUST_KERNELS,
    IMAGE_TOKENS,
    drafts(
        "--draft",
        "drafts",
        type=Several(OneOf(*DRAFTS)),
        metavar="NAME,NAME",
        help="Continue held-out code with drafts, and with off without: off, qspec, lookup, mtp, both or auto.",
    ),
    drafts("--gamma", type=Gamma(), metavar="auto|N", default="auto", show_default=True, help="Draft length, 1 to 7 tokens."),
    tests(
        "--sustained",
        type=Amount(),
        metavar="MINUTES",
        help="Then decode without a pause for so long: first and last minute, drop, heat.",
    ),
    output(
        "--what-if",
        "changes",
        type=WhatIf(),
        multiple=True,
        metavar="CHANGE",
        help="Predict decode with bits=3, threads=4 or board=NAME, or several of them with commas between; may be given "
        "several times.",
    ),
    output(
        "--baseline",
        type=click.Path(path_type=Path),
        metavar="OLD.json",
        help="Compare the results with a profile that --save kept, in the tables and on the page.",
    ),
    output(
        "--operations/--no-operations",
        default=True,
        show_default=True,
        help="Run each test a second time with a clock around every operation, in turn with the plain runs.",
    ),
    output("-o", "--output", type=OneOf(*FORMATS), default="md", show_default=True, help="Format of the results."),
    output("--save", type=click.Path(path_type=Path), metavar="OUT", help="Keep the results as JSON too, after every round."),
    comparison(
        "--compare",
        "compared",
        nargs=2,
        type=click.Path(path_type=Path),
        metavar="A.json B.json",
        help="Compare two profiles that --save kept: faster, slower, or not separable by the spread of their runs.",
    ),
    comparison(
        "--fail-if-slower",
        type=Share(),
        metavar="P%",
        help="Exit with 3 if a test of B is slower, separably and by at least so much.",
    ),
    trusting,
)
