"""Decode speeds of NVIDIA GPUs as bandwidth bounds them: `python -m edgeq.tools.lab.gpu_roofline > docs/cuda-speed.md`.

The predictions are those of `edgeq fit`, from bytes per token and peak bandwidth; beside them launches per token, as the CUDA
target's lowering gives them, and what others publish of the same boards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from edgeq.codec import Codec
from edgeq.config import ModelConfig
from edgeq.container import ModelFile
from edgeq.converters.families.table import recognise
from edgeq.devices import DEVICES, Device
from edgeq.runtime.decoder import decoder
from edgeq.targets.target import Options
from edgeq.tools.entry import Command
from edgeq.tools.lab.make_checkpoint import SHAPES, llama_config
from edgeq.tools.random_file import bytes_per_token, with_layers, write_random

CODEC = Codec("int", 4, 128)
MODELS = ("smollm-135m", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
LAUNCH_US = (1.0, 5.0)
"""Microseconds that a launch inside a graph is taken to cost beside its bytes: a range, measured nowhere here."""
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
BOARDS = tuple(dict.fromkeys(bar.device for bar in BARS))


def config_of(name: str) -> ModelConfig:
    return recognise(llama_config(SHAPES[name]))[1]


def launches(config: ModelConfig) -> int:
    """Launches of a token, from files of this shape with one layer and with two."""
    # What is planned is made of a program; where nobody asks for this page, nothing of the target is imported.
    from edgeq.targets.cuda.plan import launches_per_token

    counted = []
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        for layers in (1, 2):
            path = Path(folder) / f"{layers}.edgeq"
            write_random(path, with_layers(config, layers), CODEC)
            file = ModelFile.open(path)
            counted.append(launches_per_token(decoder(file.metadata), file, Options("a16", max_rows=16)))
    return counted[0] + (config.num_hidden_layers - 1) * (counted[1] - counted[0])


def speeds(device: Device, config: ModelConfig, count: int) -> tuple[float, float, list[float]]:
    """Tokens per second by `edgeq fit`'s shares of the bandwidth, least and most; and expected with each of LAUNCH_US."""
    read = bytes_per_token(config, CODEC)
    seconds = device.decode_seconds(read)
    return *device.decode_range(read, 0), [1 / (seconds + count * us * 1e-6) for us in LAUNCH_US]


def speed_up(beta: float, gamma: int, draft: float, verify: float) -> float:
    """Of decode with drafts (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8), costs in runs of one row."""
    return (1 - beta ** (gamma + 1)) / (1 - beta) / (gamma * draft + verify)


def page() -> Iterator[str]:
    configs = {name: config_of(name) for name in MODELS}
    counts = {name: launches(config) for name, config in configs.items()}
    low, high = LAUNCH_US
    yield f"""# Speed on NVIDIA GPUs, computed

**Every number of edgeq on this page is computed. Nothing has run on these boards.** This page is the output of
`python -m edgeq.tools.lab.gpu_roofline`. Weights are {CODEC.name} everywhere, the head too; a token reads all of them
once, at 70 to 90 % of the memory's peak bandwidth: the numbers of `edgeq fit`, without the cache, which a short text has
little of. Small models take longer than that, as every launch costs time beside its bytes: two columns add {low:g} and
{high:g} µs for each launch of a token to the expected 75 %. That is a range, not a measurement; published rows of other
runtimes fit 2 to 3.7 ms beside the bytes of a token on AGX Orin, 4 to 7 on an Orin Nano and 0.5 on a 4090.

| model | MB per token | launches per token |
|---|---|---|"""
    for name in MODELS:
        yield f"| {name} | {bytes_per_token(configs[name], CODEC) / 1e6:,.0f} | {counts[name]} |"
    yield f"""
## Decode, one text

Tokens per second; *computed* but for the published bars. Trust of those: A, raw output or a published script; B, a
vendor's table or a careful single report. Most do not state the power mode, and their models are not to the byte those
of the first column.

| device | peak GB/s | model | computed, 70 to 90 % | computed, {low:g} µs | computed, {high:g} µs | published | trust |
|---|---|---|---|---|---|---|---|"""
    for board in BOARDS:
        device = DEVICES[board]
        for name in MODELS:
            if device.longest_context(bytes_per_token(configs[name], CODEC), 1) == 0:
                continue
            least, most, each = speeds(device, configs[name], counts[name])
            bar = next((bar for bar in BARS if (bar.device, bar.model) == (board, name)), None)
            told = f"{bar.tokens} ({bar.runtime}) | {bar.trust}" if bar else "|"
            numbers = f"{least:,.0f} to {most:,.0f} | {each[0]:,.0f} | {each[1]:,.0f}"
            yield f"| {board} | {device.bandwidth / 1e9:.1f} | {name} | {numbers} | {told} |"
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


@click.command(cls=Command)
def main() -> None:
    """Print docs/cuda-speed.md."""
    click.echo("\n".join(page()))


if __name__ == "__main__":
    main()
