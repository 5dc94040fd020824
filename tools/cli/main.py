"""The command line: options only.  A command imports what it runs inside its function, so that `edgeq --help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgeq import __version__
from edgeq.tools.cli import cache_options, export_options
from edgeq.tools.cli.batch_options import BATCH_OPTIONS
from edgeq.tools.cli.convert_options import CONVERT_OPTIONS
from edgeq.tools.cli.embed_options import EMBED_OPTIONS, act, rerank
from edgeq.tools.cli.entry import Commands
from edgeq.tools.cli.help_sections import section
from edgeq.tools.cli.options import (
    BENCH_TESTS,
    BUILD_OPTIONS,
    DRAFT_OPTIONS,
    GENERATION_OPTIONS,
    HELD_OPTIONS,
    IMAGE_TOKENS,
    IMAGES,
    JSON,
    MODEL,
    TARGET_OPTIONS,
    THREADS,
    chat_options,
    execution,
    prompt,
)
from edgeq.tools.cli.params import EdgeqFile, OneOf, Several, Threads
from edgeq.tools.cli.serve_options import SERVE_OPTIONS
from edgeq.tools.hub import options as hub_options
from edgeq.tools.profile.options import FIT_OPTIONS, PROFILE_OPTIONS


@click.group(
    "edgeq",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""
    edgeq convert meta-llama/Llama-3.2-1B-Instruct -o llama.edgeq --method awq
    edgeq chat llama.edgeq
    """,
)
@click.version_option(__version__, prog_name="edgeq")
def main() -> None:
    """Quantize a language model into one packed low-bit file and run it on your own device."""


output = section("Output")


@main.command(
    short_help="Make an .edgeq file of a Hugging Face model.",
    epilog="""
    edgeq convert models/tiny-llama -o tiny.edgeq
    edgeq convert Qwen/Qwen3-0.6B -o qwen.edgeq --method awq --group-size 64
    edgeq convert Qwen/Qwen3-0.6B -o qwen.edgeq --for raspberry-pi-5 --speed 30
    """,
)
@click.argument("source", metavar="SRC")
@CONVERT_OPTIONS
def convert(
    source: str,
    output: Path | None,
    *,
    dry_run: bool,
    as_json: bool,
    target: str | None,
    bits: dict[str, float] | None,
    vision_bits: dict[str, int] | None,
    **options: Any,
) -> None:
    """Make an .edgeq file of SRC: a Hugging Face folder or hub id, a GGUF file, or hf:ORG/REPO:QUANT for one of the hub.

    If it was interrupted, the same command continues where it stopped.  Private models of the hub are read with the token of
    `hf auth login` or HF_TOKEN.
    """
    if output is None and not dry_run:
        raise click.UsageError("missing option '-o' / '--output'", click.get_current_context())
    from edgeq.tools.commands.convert import convert as command

    command(source, None if dry_run else output, target, as_json, options | (bits or {}) | (vision_bits or {}))


main.add_command(hub_options.pull)
main.add_command(hub_options.show)
main.add_command(hub_options.remove)
main.add_command(rerank)
main.add_command(act)


@main.command(
    short_help="Continue a prompt.",
    epilog="""
    edgeq run llama.edgeq -p "The capital of France is" -n 32
    edgeq run llama.edgeq -f notes.txt --temp 0.7 --top-p 0.9 --seed 1
    edgeq run qwen2-vl.edgeq --image sign.png -p "What does the sign say?"
    edgeq run instruct.edgeq --chat --json-schema person.json -p "Who wrote Hamlet?"
    git diff | edgeq run instruct.edgeq --chat --system "Summarize this change." -f -
    """,
)
@MODEL
@prompt("-p", "--prompt", metavar="TEXT", help="The text to continue.")
@prompt(
    "-f",
    "--file",
    metavar="FILE",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A UTF-8 file with the text to continue; -: standard input.",
)
@prompt("--chat", is_flag=True, help="Send the prompt as a user's message, through the chat template of the model.")
@chat_options(with_chat="; needs --chat")
@IMAGES
@IMAGE_TOKENS
@GENERATION_OPTIONS
@HELD_OPTIONS
@JSON
@click.option("--jsonl", "as_lines", is_flag=True, help="Print a JSON object for every token, then that of --json.")
def run(**options: Any) -> None:
    """Continue a prompt from -p, -f or standard input; the speed follows on standard error."""
    if options["as_json"] and options["as_lines"]:
        raise click.UsageError("--json and --jsonl exclude each other")
    from edgeq.tools.commands.run import run as command

    command(**options)


@main.command(
    short_help="Talk with a model.",
    epilog="""
    edgeq chat instruct.edgeq --system "Answer in one sentence."
    edgeq chat instruct.edgeq --temp 0.7 --seed 3 -c 8192
    """,
)
@MODEL
@chat_options(with_chat="")
@IMAGE_TOKENS
@prompt("--history/--no-history", default=True, show_default=True, help="Keep typed lines for the arrow keys of later chats.")
@GENERATION_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print each answer as one JSON object in a line, with its measurements.")
def chat(**options: Any) -> None:
    """Talk with a model.  The conversation stays in the cache; /help lists the commands."""
    from edgeq.tools.commands.chat import chat as command

    command(**options)


@main.command(
    short_help="Make vectors of texts.",
    epilog="""
    edgeq embed qwen3-embedding.edgeq -p "The capital of France is Paris." -p "Bananas are yellow."
    edgeq embed qwen3-embedding.edgeq --prompt query --dimensions 256 < questions.txt
    edgeq embed qwen3-embedding.edgeq --file documents.jsonl > vectors.jsonl
    """,
)
@MODEL
@EMBED_OPTIONS
@JSON
def embed(**options: Any) -> None:
    """Make a vector of every text: of -p, of each line of --file or of standard input.  For models that were trained for it.

    Every line that is printed is a JSON array with the numbers of a text; the speed follows on standard error.
    """
    from edgeq.tools.commands.embed import embed as command

    command(**options)


@main.command(
    short_help="Serve a model over HTTP.",
    epilog="""
    edgeq serve llama.edgeq
    edgeq serve llama.edgeq --host 0.0.0.0 --api-key-file keys.txt --seats 8
    """,
)
@MODEL
@SERVE_OPTIONS
def serve(**options: Any) -> None:
    """Serve FILE to clients of OpenAI's and Anthropic's interfaces: chats and completions at /v1, several at once.

    Without a key only this machine can ask.  EDGEQ_API_KEY holds one key, --api-key-file several with names.
    """
    from edgeq.tools.commands.serve import serve as command

    command(**options)


main.add_command(cache_options.cache)
main.add_command(export_options.export)


@main.command(
    short_help="Answer the requests of a file.",
    epilog="""
    edgeq batch llama.edgeq requests.jsonl -o answers.jsonl
    edgeq batch llama.edgeq requests.jsonl -o answers.jsonl --ray 10.0.0.1:6379 --workers 4
    """,
)
@MODEL
@BATCH_OPTIONS
def batch(**options: Any) -> None:
    """Answer the requests in IN.jsonl, lines in the shape of OpenAI's batches, several at once.

    A run that was ended goes on where it was.  Exit code 1: a line has no answer; its record says why.
    """
    from edgeq.tools.commands.batch import batch as command

    command(**options)


@main.command(
    short_help="Measure speed: prompts (pp) and decoding (tg).",
    epilog="""
    edgeq bench llama.edgeq
    edgeq bench llama.edgeq -p 512,2048 -n 128 -d 0,4096 -t 1,2,4
    edgeq bench llama.edgeq -p 0 -n 64 --operations --json
    """,
)
@MODEL
@BENCH_TESTS
@execution(
    "-t",
    "--threads",
    type=Several(Threads()),
    metavar="N,N",
    default="auto",
    show_default=True,
    help="Threads; auto: as many as were measured to decode fastest on this machine.",
)
@IMAGE_TOKENS
@TARGET_OPTIONS
@DRAFT_OPTIONS
@output("--operations", is_flag=True, help="Show where the time goes: each kind of operation, waiting, Python.")
@output("-o", "--output", type=OneOf("md", "json", "csv"), default="md", show_default=True, help="Format of the results.")
@output("--json", "as_json", is_flag=True, help="The same as -o json.")
@click.pass_context
def bench(ctx: click.Context, /, output: str, as_json: bool, **options: Any) -> None:
    """Measure how fast prompts are read (pp512) and tokens are decoded (tg128).  N,N is a list of numbers."""
    if as_json and output != "json" and ctx.get_parameter_source("output") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(f"--json and -o {output} exclude each other")
    from edgeq.tools.commands.bench import bench as command

    command(output="json" if as_json else output, **options)


@main.command(
    short_help="Find out where the time goes.",
    epilog="""
    edgeq profile llama.edgeq
    edgeq profile llama.edgeq -p 512 -n 128 -d 0,2048 -t 1,2 --mode a16,a8 --save laptop.json
    edgeq profile llama.edgeq -o trace > trace.json
    edgeq profile --compare before.json after.json --fail-if-slower 5%
    """,
)
@PROFILE_OPTIONS
@click.pass_context
def profile(ctx: click.Context, /, compared: tuple[Path, Path] | None, fail_if_slower: float | None, **options: Any) -> None:
    """Measure every combination in one run, alternating: each test, each operation, how far it is from this machine's limits.

    Ctrl-C ends it early; what was measured until then is printed and marked as partial.
    """
    if (options["model"] is None) == (compared is None):
        raise click.UsageError("give an .edgeq file to measure, or --compare with two saved profiles", ctx)
    if fail_if_slower is not None and compared is None:
        raise click.UsageError("--fail-if-slower needs --compare", ctx)
    if compared is not None and (unused := _given(ctx, "model", "compared", "fail_if_slower", "output")):
        raise click.UsageError(f"{unused[0]} is of no use with --compare, which measures nothing", ctx)
    from edgeq.tools.profile.command import compare, profile

    if compared is None:
        profile(**options)
    else:
        compare(compared, options["output"], fail_if_slower)


def _given(ctx: click.Context, *others: str) -> list[str]:
    """The options that the user gave, without `others`."""
    typed = click.core.ParameterSource.COMMANDLINE
    given = (p for p in ctx.command.params if p.name and ctx.get_parameter_source(p.name) is typed)
    return [max(p.opts, key=len) for p in given if p.name not in others]


@main.command(
    short_help="Say whether a file fits a device, and its speed.",
    epilog="""
    edgeq fit llama.edgeq --for raspberry-pi-5
    edgeq fit llama.edgeq --for raspberry-pi-5-4gb --context 8192 --speed 10
    """,
)
@FIT_OPTIONS
def fit(**options: Any) -> None:
    """Say whether FILE fits a device before it is copied there: with which context, how fast, and what bounds it.

    Exit code 1: it does not fit, or is slower than --speed.
    """
    from edgeq.tools.profile.prediction.fit import fit as command

    command(**options)


@main.command(short_help="Show what is in a file.")
@MODEL
@click.option("--verify", is_flag=True, help="Check every byte against its digest.")
@click.option("--show", "shown", metavar="NAME", help="Print one text of the file: chat_template or tokenizer.json.")
@JSON
def inspect(**options: Any) -> None:
    """Show what is in a file: layers, codecs, effective bits per weight, sizes and origin."""
    if options["as_json"] and options["shown"]:
        raise click.UsageError("--json and --show exclude each other")
    from edgeq.tools.commands.inspect import inspect as command

    command(**options)


comparison = section("Comparison")


@main.command(
    short_help="Measure what quantization lost.",
    epilog="""
    edgeq compare llama.edgeq --against meta-llama/Llama-3.2-1B
    edgeq compare rtn.edgeq awq.edgeq --against models/tiny-llama --text wiki.txt
    """,
)
@click.argument("models", metavar="FILE...", nargs=-1, required=True, type=EdgeqFile())
@comparison(
    "--against",
    metavar="SRC",
    required=True,
    help="Hugging Face folder, hub id or .edgeq file to compare with.",
)
@comparison(
    "--text",
    metavar="FILE|code|docs",
    default="code",
    show_default=True,
    help="A UTF-8 text file; code: modules of Python; docs: its language reference.",
)
@comparison("--window", type=click.IntRange(2), metavar="N", help="Tokens of a window.  [default: 512 or the model's limit]")
@comparison(
    "--limit",
    type=click.IntRange(2),
    metavar="N",
    default=32768,
    show_default=True,
    help="Use at most N tokens of the text.",
)
@THREADS
@TARGET_OPTIONS
@JSON
def compare(**options: Any) -> None:
    """Measure what a file lost: perplexity, KL divergence and top-1 agreement against SRC, with 95 % intervals; of a model that
    embeds texts the cosine similarity of vectors, of a policy the error of actions, against a file.

    A checkpoint is run block by block, once for a text: what the comparison needs of it is kept in the cache folder.
    """
    from edgeq.tools.commands.compare import compare as command

    command(**options)


@main.command(
    short_help="Compile the kernels of a model ahead of its first run.",
    epilog="""
    edgeq build llama.edgeq
    edgeq build llama.edgeq --for raspberry-pi-5,jetson-agx-orin-64gb
    edgeq build llama.edgeq --for sm_87,rtx-4090 --kv file,int8 -o llama.edgeq.kernels
    """,
)
@MODEL
@BUILD_OPTIONS
@JSON
def build(**options: Any) -> None:
    """Compile the kernels that FILE needs, so that its first run starts at once: here, or with --for on other machines.

    --for writes them into a pack beside FILE: copy both.  Where FILE runs, --trust-kernels accepts the pack.  For GPUs it needs
    pip install edgeq[build], and no GPU; the machine with the GPU only edgeq[cuda12] or edgeq[cuda13].
    """
    from edgeq.tools.commands.build import build as command

    command(**options)


@main.command(short_help="Show this machine, and the devices of --for.")
@JSON
def devices(as_json: bool) -> None:
    """Show this machine, which target and instruction set are used and why, and the devices of --for."""
    from edgeq.tools.commands.devices import devices as command

    command(as_json)
