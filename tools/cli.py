"""The command line: options only.  A command imports what it runs inside its function, so that `edgeq --help` is quick."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from edgeq import __version__
from edgeq.tools.entry import Commands
from edgeq.tools.params import Bits, Gamma, GroupSize, Numbers, Threads

F = TypeVar("F", bound=Callable[..., Any])


def decorated(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order given."""

    def apply(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


def requantization(command: F) -> F:
    """The options --requantize... become `requantization`, as Model.load takes it: None if none was given."""

    @wraps(command)
    def apply(**options: Any) -> Any:
        from edgeq.runtime.requantize import Requantization

        knobs = ("alpha", "damping", "per_token", "min_tokens")
        names = {"requantize": "when"} | {f"requantize_{name}": name for name in knobs}
        given = {name: options.pop(option) for option, name in names.items()}
        given = {name: value for name, value in given.items() if value is not None}
        return command(requantization=Requantization(**given) if given else None, **options)

    return cast(F, apply)


MODEL = click.argument("model", metavar="FILE", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
TARGET_OPTIONS = decorated(
    click.option("--target", metavar="reference|cpu", help="Where to run; by default the best that this machine has."),
    click.option("--isa", metavar="NAME", help="Instruction set of the CPU target, such as avx2 or portable."),
    click.option("--mode", metavar="a16|a8|a4", help="Bits of activations; by default what the file says."),
    click.option(
        "--kv",
        metavar="file|f16|int8|int4",
        default="file",
        show_default=True,
        help="How keys and values are cached; file: as the file was made for.",
    ),
    click.option("--threads-prefill", type=Threads(), default="auto", show_default=True, help="Threads while a prompt is run."),
    click.option(
        "--requantize",
        metavar="prompt|drift|never",
        help="Files with masters: make weights anew behind every prompt, when its channels drift, or never.  [default: prompt]",
    ),
    click.option("--requantize-alpha", type=float, help="0: plain rounding, 1: finer as inputs are larger.  [default: 0.5]"),
    click.option("--requantize-damping", type=float, help="Added to every channel's sum of squares.  [default: 0.4]"),
    click.option("--requantize-per-token", is_flag=True, default=None, help="Mean squares instead of sums."),
    click.option("--requantize-min-tokens", type=int, help="With fewer tokens the file's own weights stay.  [default: 16]"),
    requantization,
)
THREADS = click.option("-t", "--threads", type=Threads(), default="auto", show_default=True)
DRAFT_OPTIONS = decorated(
    click.option(
        "--draft",
        metavar="auto|off|qspec|lookup|both",
        default="off",
        show_default=True,
        help="Guess tokens and check several at once: in a cheaper mode of the same weights (qspec), from the text so far.",
    ),
    click.option("--gamma", type=Gamma(), default="auto", show_default=True, help="Tokens of a guess, 1 to 7; auto pays."),
)
GENERATION_OPTIONS = decorated(
    click.option("-n", "--tokens", type=int, default=256, show_default=True, help="Most tokens to generate."),
    click.option("--temp", type=float, help="Temperature; 0: always the most probable token."),
    click.option("--top-k", type=int, help="Keep the K most probable tokens; 0: all."),
    click.option("--top-p", type=float, help="Keep the most probable tokens with this mass."),
    click.option("--min-p", type=float, help="Keep tokens at least this share as probable as the best."),
    click.option("--repeat-penalty", type=float, help="Penalty of tokens already seen; 1: none."),
    click.option("--seed", type=int, help="Same seed, same text.  [default: 0]"),
    click.option("--stop", multiple=True, help="Stop before this text; may be given again."),
    click.option("-c", "--context", type=int, help="Positions of the cache; by default what fits, at most 4096."),
    DRAFT_OPTIONS,
    THREADS,
    TARGET_OPTIONS,
)


@click.group("edgeq", cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="edgeq")
def main() -> None:
    """Quantize a language model into one packed low-bit file and run it on the device in front of you."""


@main.command()
@click.argument("source", metavar="SRC")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The file to write.")
@click.option(
    "--method",
    metavar="NAME",
    default="rtn",
    show_default=True,
    help="How weights are quantized: none, rtn, awq, gptq, awq+gptq, smoothquant, smoothquant+gptq, ttq, quarot or resq.",
)
@click.option("--bits", type=Bits(), help="Bits of weights, activations and cache, such as 4, 4/8 or 4/4/4.  [default: 4]")
@click.option("--group-size", type=GroupSize(), help="Channels per scale: 16, 32, 64, 128 or row.  [default: the method's]")
@click.option("--sym/--asym", "symmetric", default=None, help="Without or with zero points.  [default: the method's]")
@click.option("--act-order/--no-act-order", "act_order", default=None, help="GPTQ: columns of large activations first.")
@click.option("--gptq/--no-gptq", "gptq", default=None, help="Rotated methods: weights by GPTQ, or by rounding.")
@click.option("--rank", type=int, help="ttq: rank of the 16-bit part.  [default: 16]")
@click.option("--master", metavar="i8|bf16", help="ttq: how the weights are kept for the device.  [default: i8]")
@click.option("--alpha", type=float, help="smoothquant: how much of the activations' range moves, 0 to 1.  [default: 0.5]")
@click.option("--high-fraction", type=float, help="resq: share of the channels in 8 bits.  [default: 0.125]")
@click.option("--head", type=int, help="Bits of the head: 4, 6, 8 or 16; by default measured with calibration text, else 8.")
@click.option("--dtype", metavar="f32|f16|bf16", help="Type of the weights with --method none; by default as stored.")
@click.option("--for", "device", metavar="DEVICE", help="Say whether it fits this device; `edgeq devices` lists them.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Text to measure and calibrate with.  [default: built in]")
@click.option("--calibration-rows", type=int, help="Most rows of the text to use.  [default: 64]")
@click.option("--calibration-length", type=int, help="Tokens of a row.  [default: 512, or as many as the model takes]")
@click.option("--restart", is_flag=True, help="Start over instead of going on with an interrupted conversion.")
@click.option("--token", help="Access token of the Hugging Face hub.")
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--offline", is_flag=True, help="Use only what was downloaded before.")
def convert(source: str, output: Path, bits: dict[str, int] | None, **options: Any) -> None:
    """Make an .edgeq file of SRC, a Hugging Face folder or hub id.

    Run again after an interruption, it goes on where it was.
    """
    from edgeq.tools.convert import convert as command

    command(source, output, options | (bits or {}))


@main.command()
@MODEL
@click.option("-p", "--prompt", help="The text to continue.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="A file with the text to continue.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message, through the model's chat template.")
@click.option("--system", help="System message, with --chat.")
@click.option("--chat-template", type=click.Path(path_type=Path), help="A jinja file to use, with --chat.")
@GENERATION_OPTIONS
@JSON
def run(**options: Any) -> None:
    """Continue a prompt, from -p, -f or standard input; ends with the speed on standard error."""
    from edgeq.tools.run import run as command

    command(**options)


@main.command()
@MODEL
@click.option("--system", help="System message.")
@click.option("--chat-template", type=click.Path(path_type=Path), help="A jinja file to use instead of the model's own.")
@GENERATION_OPTIONS
def chat(**options: Any) -> None:
    """Talk with a model; what was said stays in its cache.  /help lists the commands."""
    from edgeq.tools.chat import chat as command

    command(**options)


@main.command()
@MODEL
@click.option("-p", "--prompt", "prompts", type=Numbers(0), default="512", show_default=True, help="Tokens prefilled; 0: skip.")
@click.option("-n", "--tokens", type=Numbers(0), default="128", show_default=True, help="Tokens decoded; 0: skip.")
@click.option("-d", "--depth", "depths", type=Numbers(0), default="0", show_default=True, help="Tokens in the cache before.")
@click.option("-t", "--threads", metavar="N,N", default="auto", show_default=True, help="Numbers of threads.")
@click.option("-r", "--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--batch", "batches", type=Numbers(1), default="1", show_default=True, help="Texts decoded at once.")
@DRAFT_OPTIONS
@click.option("--operations", is_flag=True, help="Show where the time goes: each kind of operation, waiting, Python.")
@click.option("-o", "--output", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True)
@TARGET_OPTIONS
def bench(threads: str, **options: Any) -> None:
    """Measure prefill (pp512) and decode (tg128, tg128 @ d512); every number may be a list."""
    from edgeq.tools.bench import bench as command

    command(threads=tuple(Threads().convert(part, None, None) for part in threads.split(",")), **options)


@main.command()
@MODEL
@click.option("--verify", is_flag=True, help="Check the digest of every byte.")
@JSON
def inspect(**options: Any) -> None:
    """Show what is in a file: layers, codecs, effective bits per weight, sizes, where it came from."""
    from edgeq.tools.inspect import inspect as command

    command(**options)


@main.command()
@click.argument("models", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--against", metavar="SRC", required=True, help="Hugging Face folder, hub id or .edgeq file to compare with.")
@click.option("--text", default="code", show_default=True, help="A text file, or code or docs: held-out text of Python itself.")
@click.option("--window", type=click.IntRange(2), help="Tokens per window.  [default: 512 or the model's limit]")
@click.option("--limit", type=click.IntRange(2), default=32768, show_default=True, help="Most tokens of the text to use.")
@THREADS
@TARGET_OPTIONS
@JSON
def compare(**options: Any) -> None:
    """Measure what a file lost: perplexity of both, KL divergence, top-1 agreement, with intervals."""
    from edgeq.tools.compare import compare as command

    command(**options)


@main.command()
@MODEL
@THREADS
@TARGET_OPTIONS
def warm(**options: Any) -> None:
    """Compile what a model needs, ahead of its first run."""
    from edgeq.tools.warm import warm as command

    command(**options)


@main.command()
@JSON
def devices(as_json: bool) -> None:
    """Show what this machine has, what will be used and why, and the devices that --for knows."""
    from edgeq.tools.devices import devices as command

    command(as_json)
