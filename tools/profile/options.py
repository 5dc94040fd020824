"""Options of `edgeq profile` and `edgeq fit`; imported with the command line, so nothing heavy."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import click

from edgeq.devices import DEVICES
from edgeq.tools.help_sections import decorated, section
from edgeq.tools.options import BENCH_TESTS, CACHES, IMAGE_TOKENS, JSON, MODEL, MODES, TARGETS, execution
from edgeq.tools.params import Amount, Count, EdgeqFile, OneOf, Several, Threads

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
    """A device by name, or this machine; a name that is nearly one is suggested."""

    def __init__(self) -> None:
        super().__init__(THIS_MACHINE, *DEVICES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = difflib.get_close_matches(str(value).casefold(), self.choices, 3, 0.5)
            if near:
                self.fail(f"{value!r} is not known; did you mean {' or '.join(near)}? edgeq devices lists all", param, ctx)
            raise error


FIT_OPTIONS = decorated(
    MODEL,
    click.option("--for", "board", type=Board(), required=True, metavar="DEVICE", help="The device; edgeq devices lists them."),
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
    execution("--target", type=OneOf(*TARGETS), help="cpu or reference.  [default: cpu if it can run here]"),
    execution(
        "--isa", metavar="NAME", help="Instruction set of the cpu target; see edgeq devices.  [default: the fastest here]"
    ),
    IMAGE_TOKENS,
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
)
