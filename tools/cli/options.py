"""Options that several commands share, under the headings that their help has.

The names that an option takes are written here, for importing what defines them would make `edgeq --help` slow; a test holds
them to their definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from edgeq.tools.cli.help_sections import decorated, section
from edgeq.tools.cli.params import Count, EdgeqFile, Gamma, OneOf, PixelSize, Seed, Several, Threads, remember_tower

F = TypeVar("F", bound=Callable[..., Any])

MODES = ("a16", "a8", "a4")
TARGETS = ("cuda", "cpu", "reference")
CACHES = ("file", "f16", "int8", "int4")
DRAFTS = ("off", "qspec", "lookup", "mtp", "both", "auto")
WHEN = ("prompt", "drift", "never")


def requantization(command: F) -> F:
    """The options --requantize... become `requantization`, as Model.load takes it: None if none was given."""

    @wraps(command)
    def apply(**options: Any) -> Any:
        from edgeq.runtime.session.requantize import Requantization

        settings = ("alpha", "damping", "per_token", "min_tokens")
        names = {"requantize": "when"} | {f"requantize_{name}": name for name in settings}
        given = {name: options.pop(option) for option, name in names.items()}
        given = {name: value for name, value in given.items() if value is not None}
        return command(requantization=Requantization(**given) if given else None, **options)

    return cast(F, apply)


prompt = section("Prompt")
text = section("Text")
sampling = section("Sampling (a model file may recommend other defaults)")
execution = section("Execution")
tests = section("Tests (lists: every combination is measured)")
drafts = section("Drafts (speculative decoding)")
requantize = section("Test-time quantization")


def trusting(command: F) -> F:
    """The option --trust-kernels: packs of the models of a command are trusted from now on, before it runs."""

    @wraps(command)
    def apply(*arguments: Any, trust_kernels: bool, **options: Any) -> Any:
        if trust_kernels:
            from edgeq.format.container import ModelFile
            from edgeq.targets.kernel_packs import accept
            from edgeq.tools.cli.terminal import note

            for path in options["models"] if "models" in options else (options["model"],):
                for pack in accept(ModelFile.open(path)) if path else ():
                    note(f"{pack.name}: trusted from now on, digest {pack.digest}")
        return command(*arguments, **options)

    return cast(F, apply)


MODEL = click.argument("model", metavar="FILE", type=EdgeqFile())
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
THREADS = execution(
    "-t",
    "--threads",
    type=Threads(),
    metavar="auto|N",
    default="auto",
    show_default=True,
    help="Threads while tokens are decoded; auto: as many as were measured to decode fastest on this machine.",
)
TRUST_KERNELS = execution(
    "--trust-kernels",
    is_flag=True,
    help="Trust the pack of kernels beside or inside FILE from now on: machine code, which can do what you can do.",
)
EXECUTION_OPTIONS = decorated(
    execution(
        "--threads-prefill",
        type=Threads(),
        metavar="auto|N",
        default="auto",
        show_default=True,
        help="Threads while a prompt is read; auto: one for each fast core.",
    ),
    execution(
        "--mode",
        type=OneOf(*MODES),
        help="Precision of activations: 16, 8 or 4 bits. Fewer bits are faster and less exact.  [default: the mode that the "
        "file records]",
    ),
    execution(
        "--kv",
        type=OneOf(*CACHES),
        default="file",
        show_default=True,
        help="Type of the cached keys and values; file: the type that the file was made for.",
    ),
    execution(
        "--target",
        type=OneOf(*TARGETS),
        help="cuda: an NVIDIA GPU, with kernels of edgeq build; cpu: compiled kernels; reference: numpy, slow, for "
        "comparison.  [default: the first of them that can run here]",
    ),
    execution(
        "--isa",
        metavar="NAME",
        help="Instruction set of the cpu target, such as avx2 or portable, or architecture of the GPU's kernels, such as "
        "sm_80; see edgeq devices.  [default: the fastest here]",
    ),
    execution(
        "--graph/--no-graph",
        "graphs",
        default=True,
        show_default=True,
        help="On a GPU record the launches of a token once and start them together, or start each by itself.",
    ),
    TRUST_KERNELS,
    trusting,
)
TARGET_OPTIONS = decorated(
    EXECUTION_OPTIONS,
    requantize(
        "--requantize",
        type=OneOf(*WHEN),
        help="For files with master weights (convert --method ttq): round the weights again after every prompt, when the "
        "inputs have drifted, or never.  [default: prompt]",
    ),
    requantize(
        "--requantize-alpha",
        type=float,
        metavar="0..2",
        help="0: round all channels alike; above: round channels with large inputs more finely.  [default: 0.5]",
    ),
    requantize(
        "--requantize-damping",
        type=float,
        metavar="X",
        help="Added to the sum of squares of every input channel, so that silent channels keep a scale.  [default: 0.4]",
    ),
    requantize(
        "--requantize-per-token",
        is_flag=True,
        default=None,
        help="Use mean squares per token instead of sums, so that damping does not depend on the length of the prompt.",
    ),
    requantize(
        "--requantize-min-tokens",
        type=int,
        metavar="N",
        help="Decode with the weights of the file after fewer tokens than this.  [default: 16]",
    ),
    requantization,
)
IMAGES = prompt(
    "--image",
    "images",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A picture that the question is about: PNG, JPEG, WebP, GIF or BMP; may be given several times.  The prompt goes "
    "through the chat template, as with --chat.",
)
HELD_OPTIONS = decorated(
    text(
        "--json-schema",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Hold the text to the JSON that the JSON Schema in FILE allows.",
    ),
    text(
        "--grammar",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Hold the text to the grammar in FILE: GBNF (llama.cpp's) if its name ends in .gbnf or it has ::=, else "
        "llguidance's Lark.",
    ),
)
IMAGE_TOKENS = decorated(
    execution(
        "--image-tokens",
        type=int,
        metavar="N",
        help="The most tokens that a picture gets; it is shrunk to them.  [default: as many as the file allows, at most "
        "1280 and half the context]",
    ),
    execution(
        "--mmproj",
        metavar="FILE",
        type=click.Path(path_type=Path),
        expose_value=False,
        callback=remember_tower,
        help="The GGUF file of the vision tower, if the model is a GGUF file; one of the hub brings its own.",
    ),
)
DRAFT_OPTIONS = decorated(
    drafts(
        "--draft",
        type=OneOf(*DRAFTS),
        default="off",
        show_default=True,
        help="Draft several tokens and check them in one run. qspec: drafts by the same weights in a cheaper mode; lookup: "
        "copies of what followed earlier in the text; both; mtp: the model's layer for it (Qwen3.5); auto: whichever is "
        "measured to be faster.",
    ),
    drafts(
        "--gamma",
        type=Gamma(),
        metavar="auto|N",
        default="auto",
        show_default=True,
        help="Draft length, 1 to 7 tokens; auto chooses the length with the best measured speed-up.",
    ),
)
BENCH_TESTS = decorated(
    tests(
        "-p",
        "--prompt",
        "prompts",
        type=Several(Count(0)),
        metavar="N,N",
        default="512",
        show_default=True,
        help="Tokens of the prompt (pp512); 0: no such test.",
    ),
    tests(
        "-n",
        "--tokens",
        type=Several(Count(0)),
        metavar="N,N",
        default="128",
        show_default=True,
        help="Tokens decoded one by one (tg128); 0: no such test.",
    ),
    tests(
        "-d",
        "--depth",
        "depths",
        type=Several(Count(0)),
        metavar="N,N",
        default="0",
        show_default=True,
        help="Tokens already in the cache (tg128 @ d512).",
    ),
    tests(
        "--batch",
        "batches",
        type=Several(Count(1)),
        metavar="N,N",
        default="1",
        show_default=True,
        help="Texts decoded at once.",
    ),
    tests(
        "--image",
        "images",
        type=Several(PixelSize()),
        metavar="WxH,WxH",
        default=None,
        help="Pictures of so many pixels, for a model that sees: vision tower and time to the first token.",
    ),
    tests(
        "-r",
        "--repetitions",
        type=click.IntRange(1, 1000),
        metavar="N",
        default=5,
        show_default=True,
        help="How often each test is run; the table has the median.",
    ),
)
kernels = section("Kernels compiled ahead")
BUILD_OPTIONS = decorated(
    kernels(
        "--for",
        "goals",
        type=Several(click.STRING),
        metavar="NAME,NAME",
        help="Names of edgeq devices, such as raspberry-pi-5, or architectures, such as sm_87.  [default: this machine]",
    ),
    kernels("--mode", type=OneOf(*MODES), help="Only what this precision of activations needs.  [default: every mode]"),
    kernels(
        "--kv",
        "caches",
        type=Several(OneOf(*CACHES)),
        metavar="KIND,KIND",
        default="file",
        show_default=True,
        help="Types of the cached keys and values: file, f16, int8, int4.",
    ),
    kernels(
        "-o",
        "--out",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The pack to write, or to add to; with --embed the model.  [default: FILE.kernels; with --embed FILE itself]",
    ),
    kernels("--embed", "embedded", is_flag=True, help="Put the kernels into the model file."),
    kernels("--target", type=OneOf(*TARGETS), help="Without --for: the target.  [default: the one that runs here]"),
    kernels("--isa", metavar="NAME", help="Without --for: the instruction set.  [default: the fastest here]"),
)
GENERATION_OPTIONS = decorated(
    text("-n", "--tokens", type=int, metavar="N", default=256, show_default=True, help="Generate at most N tokens."),
    text("--stop", metavar="TEXT", multiple=True, help="Stop before this text; may be given several times."),
    text(
        "-c",
        "--context",
        type=int,
        metavar="N",
        help="Positions of the cache: prompt and answer together.  [default: as many as the model takes and memory holds, at "
        "most 4096]",
    ),
    execution(
        "--lora",
        "adapter",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="A LoRA adapter as PEFT saves it, for a file whose method keeps the channels of the checkpoint.",
    ),
    sampling(
        "--temp",
        type=float,
        metavar="T",
        help="Temperature; 0: always the most probable token (greedy).  [default: 0; chats: 0.7]",
    ),
    sampling("--top-k", type=int, metavar="K", help="Draw from the K most probable tokens; 0: from all.  [default: 0]"),
    sampling(
        "--top-p",
        type=float,
        metavar="P",
        help="Draw from the fewest tokens whose probabilities sum to P; 1: from all.  [default: 1; chats: 0.95]",
    ),
    sampling(
        "--min-p",
        type=float,
        metavar="P",
        help="Draw from tokens at least P times as probable as the best one; 0: from all.  [default: 0; chats: 0.05]",
    ),
    sampling(
        "--repeat-penalty",
        type=float,
        metavar="X",
        help="Make tokens that have occurred less probable; 1: no penalty.  [default: 1]",
    ),
    sampling(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="Taken from the score of every token that the answer has; -2 to 2.  [default: 0]",
    ),
    sampling(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="The same, times how often the answer has the token; -2 to 2.  [default: 0]",
    ),
    sampling(
        "--dry-multiplier",
        type=float,
        metavar="X",
        help="Make tokens less probable that repeat four or more of the answer (DRY); 0: none.  [default: 0; chats: 0.8]",
    ),
    sampling(
        "--seed",
        type=Seed(),
        metavar="N|random",
        help="Start of the random numbers: same seed, same text.  [default: 0; chat: random]",
    ),
    THREADS,
    TARGET_OPTIONS,
    DRAFT_OPTIONS,
)


def chat_options(with_chat: str) -> Callable[[F], F]:
    """--system and --chat-template; `with_chat` ends their help."""
    return decorated(
        prompt("--system", metavar="TEXT", help=f"System message{with_chat}."),
        prompt(
            "--chat-template",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help=f"A jinja2 template to use instead of the one in the model file{with_chat}.",
        ),
    )
