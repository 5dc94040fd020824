"""The options of `edgeq convert`.

The names that an option takes are written here for the reason that `edgeq.tools.cli.options` has.
"""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.network.pooling import POOLINGS
from edgeq.system.devices import DEVICES
from edgeq.tools.cli.help_sections import decorated, section
from edgeq.tools.cli.params import Amount, Bits, Bytes, CalibrationText, GroupSize, OneOf, VisionBits

METHODS = (
    *("none", "rtn", "awq", "gptq", "awq+gptq", "smoothquant", "smoothquant+gptq", "ttq", "quarot", "resq", "mquant"),
    "as-stored",
)
TYPES = ("f32", "f16", "bf16")
MASTERS = ("i8", "bf16")
ACTIVATIONS = ("block", "token", "static", "modality")
RANKINGS = ("qwen3",)
COMPUTERS = ("auto", "cpu", "cuda", "mps")

output = section("Output")
quantization = section("Quantization")
budget = section("Budgets (one of them, or --bits with a decimal point: bits go where they were measured to matter)")
single = section("Options of single methods")
calibration = section("Calibration")
hub = section("Hugging Face hub")

CONVERT_OPTIONS = decorated(
    output("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="The file to write."),
    output("--dry-run", is_flag=True, help="Only print size, memory and speed of what would be made; a hub id is downloaded."),
    output("--json", "as_json", is_flag=True, help="Print one JSON object about the result to standard output."),
    output("--restart", is_flag=True, help="Start over instead of going on with an interrupted conversion."),
    output("--force", is_flag=True, help="Replace an .edgeq file that was made in another way."),
    output(
        "--for",
        "target",
        metavar="DEVICE",
        type=OneOf(*DEVICES),
        help="Stop before the conversion if the file would not fit this device, and report the speed that its memory "
        "allows; edgeq devices lists the names.  The file is the same for every device, but for that of --speed: it has no "
        "trellises then.",
    ),
    quantization(
        "--merge-lora",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Add a LoRA adapter, as PEFT saves it, to the weights before they are quantized.",
    ),
    quantization(
        "--tokenizer",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Take the tokenizer.json in DIR, the folder of the checkpoint that the GGUF file SRC was made of: for a file "
        "whose own tokenizer is not supported.",
    ),
    quantization(
        "--mmproj",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="The GGUF file of the vision tower that goes with the GGUF file SRC, published beside it as mmproj-....gguf.",
    ),
    quantization(
        "--pooling",
        type=OneOf(*POOLINGS),
        help="SRC is an embedding model: the vector of a text is the state of its last token, the mean of all, or, where "
        "tokens see both ways, the state of the first (cls).  [default: what modules.json of sentence-transformers says]",
    ),
    quantization(
        "--rerank",
        type=OneOf(*RANKINGS),
        help="SRC is a decoder that ranks documents, as Qwen3-Reranker does: by whether it would answer yes or no, in the "
        "prompt of that model.",
    ),
    quantization(
        "--draft-head",
        type=click.IntRange(0),
        metavar="N",
        help="Tokens that a layer which drafts proposes (Qwen3.5): about N of those that texts have most, of which the rows of "
        "the head are read for a draft; 0: all.  [default: 32768 where the vocabulary has twice as many]",
    ),
    quantization(
        "--method",
        metavar="NAME",
        type=OneOf(*METHODS),
        help="How weights are quantized: none, rtn (round to nearest), awq, gptq, awq+gptq, smoothquant, smoothquant+gptq, "
        "ttq, quarot, resq, mquant or as-stored.  [default: rtn; gptq with --calibration, a budget or a plan; "
        "as-stored where SRC is quantized already and no option asks for other bits]",
    ),
    quantization(
        "--bits",
        type=Bits(),
        metavar="W[/A[/KV]]",
        help="Bits of weights, activations and cached keys and values, such as 4, 4/8 or 4/4/4.  A whole number is the "
        "codec of every decoder layer; with a decimal point, such as 3.5 or 4.0, it is a budget.  [default: 4; "
        "smoothquant: 8/8; quarot, resq: 4/4/4; mquant: 4/8]",
    ),
    quantization(
        "--group-size",
        type=GroupSize(),
        metavar="N|row",
        help="Input channels that share a scale: 16, 32, 64, 128, or row for all of them.  [default: 128; ttq: 32; "
        "smoothquant, quarot, resq, mquant: row]",
    ),
    quantization(
        "--sym/--asym",
        "symmetric",
        default=None,
        help="Quantize without or with zero points.  [default: --asym; smoothquant: --sym]",
    ),
    quantization(
        "--half",
        is_flag=True,
        default=None,
        help="rtn, gptq, awq, awq+gptq: levels at half steps on both sides of zero, without zero points: smaller files, which "
        "lose less than with zero points at 2 bits in groups of 32 or more, else more.",
    ),
    quantization(
        "--table",
        is_flag=True,
        default=None,
        help="rtn, gptq, awq, awq+gptq, 2 to 4 bits: levels closer together near zero, as weights are, in about the bytes "
        "of --half.",
    ),
    quantization(
        "--trellis",
        is_flag=True,
        default=None,
        help="rtn, gptq, awq, awq+gptq, with --bits 2 or 3: twice the levels, among which 16 output channels choose together, "
        "and scales of 4 bits: loses least at 2 to 3.5 bits per weight.",
    ),
    quantization(
        "--scale-bits",
        type=int,
        metavar="N",
        help="With --half: 4 for scales of 4 bits, shares of one in 16 bits for each output channel.  [default: 16]",
    ),
    quantization(
        "--vision-bits",
        type=VisionBits(),
        metavar="W[/A]",
        help="Bits of the weights and activations of a vision tower: 2 to 8, or 16 for as they are; activations 8 or 16.  "
        "[default: 8/8]",
    ),
    quantization(
        "--head",
        type=int,
        metavar="N",
        help="Bits of the output head: 4, 6, 8 or 16.  [default: the fewest that lose little on the calibration text; 8 if "
        "none is read]",
    ),
    quantization(
        "--dtype",
        type=OneOf(*TYPES),
        help="Type of the weights with --method none.  [default: as in SRC]",
    ),
    budget("--size", type=Bytes(), metavar="N", help="The largest file, such as 600MB."),
    budget("--read", type=Bytes(), metavar="N", help="The most bytes that are read to decode a token, such as 0.5GB."),
    budget("--kl", type=Amount(), metavar="N", help="The largest mean KL divergence from SRC in nats, such as 0.01."),
    budget(
        "--speed", type=Amount(), metavar="N", help="Tokens per second in decode, on the device of --for or on this machine."
    ),
    budget(
        "--plan", type=click.Path(path_type=Path), metavar="FILE", help="The codec of every part, as JSON; nothing is chosen."
    ),
    budget(
        "--save-plan", type=click.Path(path_type=Path), metavar="FILE", help="Write the codecs that were chosen, for --plan."
    ),
    budget("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Write a chart of what can be had, as SVG."),
    single(
        "--act-order/--no-act-order",
        "act_order",
        default=None,
        help="gptq: quantize columns with large activations first.  [default: no; mquant: yes]",
    ),
    single(
        "--tune",
        is_flag=True,
        default=None,
        help="gptq, awq+gptq: learn the scales of every decoder layer on its output, which takes some ten times as long as "
        "the rest; --dry-run says how long.",
    ),
    single("--gptq/--no-gptq", "gptq", default=None, help="quarot, resq: round by gptq.  [default: round to nearest]"),
    single(
        "--split-row/--no-split-row",
        "split_row",
        default=None,
        help="quarot, mquant: keep the column that holds the means of a down projection's weights apart in 16 bits.  "
        "[default: no; mquant: yes]",
    ),
    single(
        "--rotate/--no-rotate",
        "rotate",
        default=None,
        help="rtn, gptq, awq, awq+gptq: round the weights of a rotated model, which spreads outliers; where the head was the "
        "embedding too, the file has both.  mquant: rotate at all.  [default: no; mquant: yes]",
    ),
    single(
        "--auto-rotate",
        is_flag=True,
        default=None,
        help="gptq, awq+gptq, without a budget or a plan: rotate if the decoder layers then lose a tenth less; both are "
        "rounded and measured on calibration text first, which takes about as long as a conversion.",
    ),
    single("--rank", type=int, metavar="N", help="ttq: rank of the 16-bit correction; 0: none.  [default: 16]"),
    single(
        "--master", type=OneOf(*MASTERS), help="ttq: type of the master weights that the device rounds from.  [default: i8]"
    ),
    single(
        "--alpha",
        type=float,
        metavar="0..1",
        help="smoothquant: share of the range of activations that moves into the weights.  [default: 0.5]",
    ),
    single(
        "--activations",
        type=OneOf(*ACTIVATIONS),
        help="rtn, smoothquant, quarot, mquant: a scale for every block of a token's channels, for every token, or constant "
        "ones measured by calibration: static, one for each layer, or modality, one for text and one for pictures.  [default: "
        "rtn: block; smoothquant, quarot: token; mquant: modality]",
    ),
    single(
        "--high-fraction", type=float, metavar="0..0.5", help="resq: share of the channels kept in 8 bits.  [default: 0.125]"
    ),
    calibration(
        "--calibration",
        metavar="FILE|DIR|built-in",
        type=CalibrationText(),
        help="UTF-8 text like what the model will read: to calibrate with, and to measure how few bits of the head and of "
        "activations are enough; built-in: Python's own source code; a folder: pictures, and samples.jsonl with image, "
        "question and answer on each line, for a model that reads pictures.  [default: built-in for awq, gptq, smoothquant, "
        "resq, and quarot with --gptq; others read nothing, for measuring takes several times as long: the head has "
        "8 bits and activations 16]",
    ),
    calibration(
        "--calibration-rows",
        type=int,
        metavar="N",
        help="Use at most N sequences of the text.  [default: 64; 128 samples with pictures]",
    ),
    calibration(
        "--calibration-length",
        type=int,
        metavar="N",
        help="Tokens of a sequence.  [default: 512, or as many as the model takes]",
    ),
    calibration(
        "--device",
        metavar="NAME",
        type=OneOf(*COMPUTERS),
        help="Where the text runs through the model, a layer at a time: cpu, cuda, mps, or auto for a GPU where there is one.  "
        "The memory that it needs there is reported first; when it runs out, the batch is halved, and in the end the CPU is "
        "used.  [default: auto]",
    ),
    hub(
        "--token",
        metavar="TOKEN",
        help="Deprecated: others can read it in the list of processes.  Run `hf auth login`, or set HF_TOKEN.",
    ),
    hub("--revision", metavar="NAME", help="Branch, tag or commit.  [default: main]"),
    hub("--offline", is_flag=True, help="Use only what was downloaded before."),
)
"""In the order of the help."""
