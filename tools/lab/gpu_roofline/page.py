"""The page of decode speeds of NVIDIA GPUs.

The launches of a token are those of the CUDA target's lowering, spread by what the compiler says of registers; what each takes
is in prediction.py.  Beside them is what others publish of the same boards.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeq.converters.families.table import recognise
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.network.config import ModelConfig
from edgeq.runtime.network.decoder import decoder
from edgeq.system.devices import DEVICES, DeviceSpec
from edgeq.targets.cuda.lowering.attention import head_blocks
from edgeq.targets.cuda.supply.nvrtc import COMPILED_FOR
from edgeq.targets.rows import PAGE
from edgeq.targets.target import Options
from edgeq.tools.lab.gpu_roofline.codecs import codecs_section
from edgeq.tools.lab.gpu_roofline.prediction import (
    ADD_PARTS,
    ADDED_TOGETHER,
    ATTENTION_HELD,
    BETTER,
    BOARD_HOST,
    BYTES_PER_CLOCK,
    CLOCKS,
    EXPECTED,
    FIRST_PAGE,
    HOST,
    NEXT_PAGE,
    UNSEEN,
    WORSE,
    AttentionWork,
    ProductWork,
    Token,
    product_bounds,
)
from edgeq.tools.lab.make_checkpoint import SHAPES, llama_config
from edgeq.tools.measure.random_file import bytes_per_token, with_layers, write_random

if TYPE_CHECKING:
    from edgeq.targets.cuda.run.plan import Product
    from edgeq.targets.cuda.supply.pack import Variant

CODEC = Codec("int", 4, 128)
MODELS = ("smollm-135m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
OPTIONS = Options("a16", max_rows=16)
GPUS = [device for device in DEVICES.values() if device.isa in {f"sm_{sm}" for sm in COMPILED_FOR}]
"""Those that there is machine code for: of a kernel from PTX nobody knows the registers before a driver compiled it."""
ARCHS = sorted({device.isa for device in GPUS})
MARGIN = 1.5
"""Bytes in flight over those that a multiprocessor needs: half as much again, as blocks do not all wait at the same time."""
CONTEXT = 256
"""Positions of the cache that a token of the tables reads."""
BETAS, GAMMAS = (0.6, 0.7, 0.8, 0.9), (1, 3, 5)
VERIFY = 1.25
"""Time of a run of up to 8 rows over that of one: what products are to keep to, which read the weights once for 8 rows."""


@dataclass(frozen=True)
class Bar:
    """Tokens per second that others publish.

    trust   A: raw output or a published script, or two sources that agree; B: a vendor's table or a careful single report
    """

    device: str
    model: str
    runtime: str
    tokens: str
    trust: str


BARS = (
    Bar("jetson-orin-nano-8gb", "llama-3.2-3b", "MLC q4f16, NVIDIA", "43.1", "B"),
    Bar("jetson-orin-nano-8gb", "llama-3.1-8b", "MLC q4f16, NVIDIA", "19.1", "B"),
    Bar("jetson-orin-nano-8gb-15w", "llama-3.2-1b", "MLC INT4, Jetson AI Lab", "54.8", "B"),
    Bar("jetson-orin-nano-8gb-15w", "llama-3.2-3b", "MLC q4f16, NVIDIA", "27.7", "B"),
    Bar("jetson-orin-nano-8gb-15w", "llama-3.1-8b", "MLC q4f16, NVIDIA", "14", "B"),
    Bar("jetson-orin-nx-16gb", "llama-3.1-8b", "TensorRT-Edge-LLM, Qwen3-8B INT4 AWQ", "19.0", "B"),
    Bar("jetson-agx-orin-64gb", "llama-3.2-1b", "MLC INT4, Jetson AI Lab", "163.9", "B"),
    Bar("jetson-agx-orin-64gb", "llama-3.2-3b", "MLC INT4, Jetson AI Lab", "80.4", "B"),
    Bar("jetson-agx-orin-64gb", "llama-3.1-8b", "vLLM W4A16; TinyChat, Llama 3", "28.1; 30.7", "B"),
    Bar("rtx-4060-laptop", "llama-3.1-8b", "Ollama", "47.2", "B"),
    Bar("rtx-4070-laptop", "llama-3.1-8b", "llama.cpp Q4_K_M", "48.1", "B"),
    Bar("rtx-4090", "llama-3.2-3b", "llama.cpp Q4_K_M, Vulkan", "335", "A"),
    Bar("rtx-4090", "llama-3.1-8b", "TinyChat, Llama 3", "156", "B"),
)
BOARDS = (*dict.fromkeys(bar.device for bar in BARS), "h100", "h200")
ONE_BY_ONE = ("llama-3.2-1b", "llama-3.1-8b")
"""Shapes whose products have a table of their own, as the first run on a GPU measures them."""
ATTENDING, ATTENDED, CONTEXTS = "llama-3.2-1b", ("jetson-agx-orin-64gb", "rtx-4090", "h200"), (64, 256, 512, 2048, 8192)
"""The shape, devices and positions of the table of attention."""

FEW_TOKENS = 1024
"""Tokens of a file of which only the launches of a layer are asked: the embedding and the head are most of a small one."""


def config_of(name: str) -> ModelConfig:
    return recognise(llama_config(SHAPES[name]))[1]


@contextmanager
def files(config: ModelConfig) -> Iterator[list[ModelFile]]:
    """Files of this shape with one layer and with two, of random weights; the second has few tokens."""
    two = replace(with_layers(config, 2), vocab_size=FEW_TOKENS)
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        paths = [Path(folder) / f"{layers}.edgeq" for layers in (1, 2)]
        for path, each in zip(paths, (with_layers(config, 1), two), strict=True):
            write_random(path, each, CODEC)
        yield [ModelFile.open(path) for path in paths]


def launches(config: ModelConfig, made: Sequence[ModelFile]) -> int:
    """Launches of a token; `made`: files of the shape with one layer and with two."""
    # What is planned is made of a program; where nobody asks for this page, nothing of the target is imported.
    from edgeq.targets.cuda.run.plan import launches_per_token

    one, two = (launches_per_token(decoder(file.metadata), file, OPTIONS) for file in made)
    return one + (config.num_hidden_layers - 1) * (two - one)


@dataclass(frozen=True)
class InFlight:
    """What a product of a decoded token has asked of the memory of a device; bytes are those of a multiprocessor.

    resident   blocks of threads that a multiprocessor has room for
    asked   None: all of the product is asked for at once
    """

    device: DeviceSpec
    product: Product
    resident: int
    asked: int | None
    needed: int

    @property
    def share(self) -> float:
        return math.inf if self.asked is None else self.asked / self.needed


def in_flight(file: ModelFile) -> Iterator[InFlight]:
    """Bytes in flight, for every CUDA device and product.  UnsupportedError: TVM or NVRTC is missing."""
    from edgeq.targets.cuda.device import occupancy
    from edgeq.targets.cuda.lowering.spread import WARPS
    from edgeq.targets.cuda.run.plan import products
    from edgeq.targets.cuda.supply import build

    for device in GPUS:
        needed = occupancy.bytes_needed(device)
        assert needed

        def resident_of(variant: Variant, device: DeviceSpec = device) -> int:
            compiled = build.compiled(variant, ARCHS)
            found = occupancy.blocks_held(compiled.images[device.isa], occupancy.threads_of(compiled.generated))
            assert found
            return found

        for each in products(decoder(file.metadata), file, OPTIONS, device.multiprocessors, resident_of):
            resident = resident_of(each.variant)
            asked = each.in_flight(resident, device.multiprocessors, 32 * WARPS)
            yield InFlight(device, each, resident, asked, needed)


@dataclass(frozen=True)
class Shape:
    """A model's launches for a token, and what its products have asked for."""

    config: ModelConfig
    launches: int
    asked: Sequence[InFlight]


def shape(name: str) -> Shape:
    config = config_of(name)
    with files(config) as made:
        return Shape(config, launches(config, made), list(in_flight(made[0])))


def work_of(row: InFlight) -> ProductWork:
    each = row.product
    whole = each.rows * each.columns * CODEC.bits / 8
    ahead = whole if row.asked is None else row.asked * row.device.multiprocessors
    places, rounds = row.resident * row.device.multiprocessors, each.rounds // each.blocks
    return ProductWork(
        each.name, each.rows, each.columns, each.ctas, places, each.blocks, rounds, each.shares, each.normed, ahead
    )


def token_of(whole_model: Shape, device: DeviceSpec) -> Token:
    config = whole_model.config
    kv_bytes = 2 * config.num_key_value_heads * config.head_dim * 2
    works = [work_of(row) for row in whole_model.asked if row.device is device]
    heads = head_blocks(config.num_attention_heads, config.num_key_value_heads)
    return Token(works, config.num_hidden_layers, whole_model.launches, kv_bytes, CONTEXT, heads)


def attention_section(config: ModelConfig) -> Iterator[str]:
    heads = head_blocks(config.num_attention_heads, config.num_key_value_heads)
    kv_bytes = 2 * config.num_key_value_heads * config.head_dim * 2
    yield f"""
## Attention

Of a layer of {ATTENDING}, one token, a cache of f16. A block of threads takes {FIRST_PAGE:,} clocks for its first page of
{PAGE} positions and {NEXT_PAGE:,} for each that follows, which it has asked for before; the parts of a context, side by
side, {ADD_PARTS:,} more for up to {ADDED_TOGETHER} of them to be left and added. {ATTENTION_HELD} blocks of threads
have a place on a multiprocessor. Beside it what the chain was when a block of threads took up to 512 positions at
{FIRST_PAGE:,} clocks a page, and 600 clocks to add each part.

| device | positions | blocks of threads | pages of one | bytes, µs | chain, µs | before, µs |
|---|---|---|---|---|---|---|"""
    for name in ATTENDED:
        device = DEVICES[name]
        for context in CONTEXTS:
            work = AttentionWork(context, heads, device.multiprocessors)
            read = context * kv_bytes / (EXPECTED.share * device.bandwidth)
            parts, places = -(-context // 512), device.multiprocessors * ATTENTION_HELD
            pages = -(-context // PAGE)
            before = FIRST_PAGE * max(min(8, pages), heads * pages / places) + 600 * parts * (parts > 1)
            times = " | ".join(f"{1e6 * each:.1f}" for each in (read, *(n / CLOCKS[name] for n in (work.chain, before))))
            yield f"| {name} | {context:,} | {heads * len(work.blocks)} | {max(work.blocks)} | {times} |"


def decode_line(device: DeviceSpec, model: str, whole_model: Shape) -> str:
    token, read = token_of(whole_model, device), bytes_per_token(whole_model.config, CODEC)
    (gpu, whole), *ends = (token.seconds(device, CODEC, assumed) for assumed in (EXPECTED, WORSE, BETTER))
    least, most = (1 / seconds for _, seconds in ends)
    bar = next((bar for bar in BARS if (bar.device, bar.model) == (device.name, model)), None)
    told = f"{bar.tokens} ({bar.runtime}) | {bar.trust}" if bar else "|"
    shown = f"{device.bandwidth / 1e9:.1f} | {CLOCKS[device.name] / 1e9:.2f} | {model}"
    times = " | ".join(f"{1e3 * seconds:.2f}" for seconds in (read / device.bandwidth, gpu, whole))
    speeds = f"{100 * read / device.bandwidth / whole:.0f} % | {1 / whole:,.0f} | {least:,.0f} to {most:,.0f}"
    return f"| {device.name} | {shown} | {times} | {speeds} | {told} |"


def product_line(device: DeviceSpec, model: str, work: ProductWork) -> str:
    found = product_bounds(work, device, CODEC, EXPECTED)
    times = " | ".join(f"{1e6 * seconds:.1f}" for seconds in (found.memory, found.chain, found.issue))
    return f"| {device.name} | {model} | {work.name} | {work.ctas} | {work.shares} | {work.waves} | {times} | {found.name} |"


def speed_up(beta: float, gamma: int, draft: float, verify: float) -> float:
    """Gain of decode with drafts (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8), costs in runs of one row."""
    return (1 - beta ** (gamma + 1)) / (1 - beta) / (gamma * draft + verify)


def line(model: str, row: InFlight) -> str:
    each, device = row.product, row.device
    asked, share = ("all", "all") if row.asked is None else (f"{row.asked / 1e3:.1f}", f"{row.share:.1f}")
    return (
        f"| {device.name} | {model} | {each.name} | {each.ctas} | {row.resident * device.multiprocessors} | {16 * each.blocks} "
        f"| {each.ahead} of {each.rounds} | {asked} | {row.needed / 1e3:.1f} | {share} |"
    )


def page(shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Lines of the page; `shapes`: of MODELS."""
    from edgeq.targets.cuda.device.occupancy import LATENCY

    configs = {name: each.config for name, each in shapes.items()}
    yield f"""# Speed on NVIDIA GPUs, predicted

**Every number of edgeq on this page is computed. Nothing has run on these boards.** This page is the output of
`python -m edgeq.tools.lab.gpu_roofline`; its arithmetic is in `tools/lab/gpu_roofline/prediction.py`. Weights are {CODEC.name}
everywhere, the head too; a token reads all of them once. It is a prediction, to be compared with measurements number by
number ([a first run](cuda.md#you-have-a-gpu-a-first-run) makes them): where one is wrong, what it was computed from is
named here.

| model | MB per token | launches per token |
|---|---|---|"""
    for name in MODELS:
        yield f"| {name} | {bytes_per_token(configs[name], CODEC) / 1e6:,.0f} | {shapes[name].launches} |"
    shares = [f"{100 * each.share:.0f}" for each in (WORSE, EXPECTED, BETTER)]
    gaps, hosts = (
        [f"{1e6 * each.gap:g}" for each in (WORSE, EXPECTED, BETTER)],
        [f"{1e6 * each:.0f}" for each in (HOST, BOARD_HOST)],
    )
    yield f"""
## Decode, one text

Greedy, {CONTEXT} positions of context. Each launch takes as long as the slowest of three, and a gap until the next one begins:

- its bytes at {shares[1]} % of the memory's peak ({shares[0]} to {shares[2]} %), and what its norm and the
  quantization of its input take longer than the bytes that were asked for before;
- the chain of a block of threads: norm, quantized input of each round, products one after another with a latency of L2
  each, times the waves in which its blocks of threads find places;
- the instructions of all warps, of which a multiprocessor issues four in a clock: {BYTES_PER_CLOCK:.0f} bytes of weights.

Attention takes its bytes, or [the chain of a block of threads](#attention). The gap is {gaps[1]} µs
({gaps[2]} to {gaps[0]}), the clocks are assumed too. The host takes {hosts[0]} µs a token, on a board {hosts[1]}, while the
GPU works, but for one token in {UNSEEN}: a token is no shorter than that. The share of the peak is that of the bytes of
weights over the whole token, the duty cycle of the memory. The range has the worse, then the better of the assumed share
and gap.

Trust of the published bars: A, raw output or a published script; B, a vendor's table or a careful single report. Most do not
state the power mode, and their models are not to the byte those of the third column.

| device | peak GB/s | GHz | model | bytes, ms | GPU, ms | token, ms | of peak | tokens/s | range | published | trust |
|---|---|---|---|---|---|---|---|---|---|---|---|"""
    for board in BOARDS:
        for name in MODELS:
            if DEVICES[board].longest_context(bytes_per_token(configs[name], CODEC), 1):
                yield decode_line(DEVICES[board], name, shapes[name])
    yield """
## Product by product

Expected microseconds of each product of a token by what may bound it; the largest is what it takes. Latency is that of
all waves; blocks of threads are those of all shares.

| device | model | product | blocks of threads | shares | waves | bytes | latency | instructions | bound by |
|---|---|---|---|---|---|---|---|---|---|"""
    for board in BOARDS:
        for name in ONE_BY_ONE:
            if DEVICES[board].longest_context(bytes_per_token(configs[name], CODEC), 1):
                token = token_of(shapes[name], DEVICES[board])
                yield from (product_line(DEVICES[board], name, work) for work in token.products)
    yield from attention_section(shapes[ATTENDING].config)
    yield f"""
## Bytes in flight

To keep its share of the memory busy a multiprocessor must have asked for bandwidth × {LATENCY * 1e6:g} µs of weights at any
time (Little's law). The table has what it has asked for, a mean of all multiprocessors, for every product of a decoded
token; {MARGIN} times the need is wanted, or that all of the product is asked for at once, which is as much as there is. It is
*computed*: from the blocks of threads that are started and those that the device holds, by the registers and the shared memory
that the compiler states; from their output channels; and from the rounds, of up to 1,024 input channels of 16 output channels,
that a block of threads asks for before it multiplies them. Assumed: that latency, that a prefetch brings all 128 bytes of a
line of L2, and that the prefetches are not dropped. At the end of the product less is left to ask for.

| device | model | product | blocks of threads | held | output channels of each | rounds ahead | KB asked | KB needed | share |
|---|---|---|---|---|---|---|---|---|---|"""
    yield from (line(name, each) for name, found in shapes.items() for each in found.asked)
    yield from codecs_section()
    yield f"""
## What drafts and 8-bit activations gain

A draft of γ tokens, each accepted with probability β, costs γ c + v runs of one row (c a drafted token, v the run that
verifies) and gives (1 - β^(γ+1)) / (1 - β) tokens (Leviathan et al. 2023). Computed with v = {VERIFY}, which is what up to
8 rows are to cost:

| | β | {" | ".join(f"γ = {gamma}" for gamma in GAMMAS)} |
|---|---|{"---|" * len(GAMMAS)}"""
    for label, cost in (("QSpec on a GPU, c = 1", 1.0), ("drafts by lookup, c = 0", 0.0), ("c = 0.5", 0.5)):
        for beta in BETAS:
            row = " | ".join(f"{speed_up(beta, gamma, cost, VERIFY):.2f}" for gamma in GAMMAS)
            yield f"| {label} | {beta} | {row} |"
    eight = configs["llama-3.1-8b"]
    finer = bytes_per_token(eight, Codec("int", 5, 128)) + bytes_per_token(eight, CODEC)
    share = 2 * bytes_per_token(eight, CODEC) / finer
    yield f"""
- **QSpec** drafts with the same weights in a cheaper mode. Where a token is bound by reading them, the draft reads as many
  bytes as the run that it saves: c = 1, and every entry is below 1 at any β. It gains only where arithmetic bounds a token:
  not at batch 1 on these boards.
- **Drafts by lookup** cost nothing on the GPU (c = 0) and gain where a text repeats itself; v, not c, decides.
- **W4A8** reads the bytes of W4A16: decode is not faster. Prompts are bound by arithmetic, and the int8 product of a tensor
  core has twice the rate of f16 (NVIDIA's data sheets of Ampere and Ada): at most twice as fast.
- **ResQ** keeps an eighth of the channels at 8 bits: 4.5 bits instead of 4 for weights, decode at {share:.2f} of the speed
  by bytes, and 6 launches a layer instead of 5. Its activations of 4 bits gain nothing at batch 1."""
