"""The speed that Arm processors can reach, computed from emitted machine code and published memory bandwidth.

    python -m edgeq.tools.lab.arm_roofline [--json]

Nothing is measured and no board is needed: LLVM compiles the inner tiles for the board's processor on any machine, the hot
loops' instructions are counted, and a model of the processor's pipelines turns them into cycles.  docs/arm.md shows the tables.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import click
import llvmlite.binding as llvm
from llvmlite import ir

from edgeq.format.codec import CHUNK, ROWS, Codec
from edgeq.format.manifest import fused_shapes
from edgeq.format.quantization import activation_block
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope
from edgeq.system.devices import DEVICES
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.processor import of_isa, settings
from edgeq.targets.cpu.kernels.args import CHUNKS
from edgeq.targets.cpu.kernels.panels.octet_tile import OctetTile
from edgeq.targets.cpu.kernels.panels.panel_matmul import GROUP_BLOCKS, PANEL, tile_of_panel
from edgeq.targets.cpu.kernels.products.bitplanes import IntegerWeights
from edgeq.targets.cpu.kernels.products.groups import SYMMETRIC
from edgeq.targets.cpu.kernels.products.microkernel_int import IntegerTile
from edgeq.tools.cli.entry import Command

TRIPLE = "aarch64-unknown-linux-gnu"
TOKENS = 4
"""Tokens of a tile of prompts."""
MULTIPLIES = ("smull", "smlal", "smull2", "smlal2", "sdot", "smmla")


@dataclass(frozen=True)
class Core:
    """The model of one core.

    Cycles of a loop are the largest of: instructions over `width`; vector instructions over `pipes`; those that only one of
    them executes; 16-byte loads over `loads`.  Latencies are left out: a block has four or more independent sums.

    isas      the instruction set that it is used with, and before that the next best one
    cpu       LLVM's name
    features  as in edgeq.system.machine.Cpu
    single    vector instructions that only one pipeline executes, by pipeline
    """

    isas: tuple[str, ...]
    cpu: str
    hertz: float
    width: int
    loads: int
    pipes: int
    single: Mapping[str, tuple[str, ...]]


# Widening multiplications run on one of two vector pipelines, shifts and widening accumulations on the other (Arm, Cortex-A72
# and Cortex-A76 Software Optimization Guides, instruction tables; the A76 has `sdot` on both).
_SINGLE = {
    "multiply": ("smull", "smlal", "smull2", "smlal2", "mul", "mla"),
    "shift": ("ushr", "sshr", "shl", "sli", "sri", "usra", "ssra", "sadalp", "uadalp", "saddlp"),
}
# Of the wide ones, whose makers publish less, every pipeline is taken to execute every vector instruction, `smmla` among them.
CORES = {
    "raspberry-pi-4": Core(("neon",), "cortex-a72", 1.5e9, 3, 1, 2, _SINGLE),
    "raspberry-pi-5": Core(("neon-dotprod",), "cortex-a76", 2.4e9, 4, 2, 2, _SINGLE),
    "apple-m2": Core(("neon-i8mm", "neon-dotprod"), "apple-m2", 3.5e9, 8, 3, 4, {}),
    "graviton-3": Core(("neon-i8mm", "neon-dotprod"), "neoverse-v1", 2.6e9, 8, 3, 4, {}),
}

# Bytes per second: reached in decode by the best published runtime, and the highest that was measured from memory; of the last
# two what the makers state.
REACHED = {"raspberry-pi-4": 3.2e9, "raspberry-pi-5": 11.8e9}
BOARDS = tuple(REACHED)
CEILING = {name: DEVICES[name].read_bandwidth for name in BOARDS} | {"apple-m2": 100e9, "graviton-3": 307.2e9}

_COMMON: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "intermediate_size": 8192, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope": Rope(theta=5e5), "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    "Llama-3.2-1B": ModelConfig(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, head_dim=64, **_COMMON),
    "Llama-3.2-3B": ModelConfig(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128, **_COMMON),
}


def compiled(
    core: Core, emit: Callable[..., None], symbol: str = "tile", arguments: int = 4
) -> tuple[llvm.TargetMachine, llvm.ModuleRef]:
    """LLVM's code generator for `core` and the module that it optimized: `emit(builder, record, n, r, out, stores_result = 0)`
    in a function named `symbol`, or with so many `arguments` before the last.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module(symbol)
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments), symbol)
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, *function.args, ir.Constant(ir.IntType(64), 0))
    builder.ret_void()
    name, features = settings(of_isa(core.isas[0]).features, core.cpu)
    target = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=name, features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return target, parsed


def tile(isa: str, bits: int, mode16: bool, group_kind: int, extent: int, tokens: int) -> IntegerTile:
    index = [each.name for each in all_isas()].index(isa)
    return IntegerTile(IntegerWeights(index, bits, int(mode16), group_kind, extent), tokens)


def assembly(board: str, bits: int, mode16: bool, tokens: int = 1) -> str:
    """The inner tile of whole chunks as LLVM compiles it for a board's processor."""
    # A token alone has no use for more than dot products.
    target, module = compiled(CORES[board], tile(CORES[board].isas[-1], bits, mode16, SYMMETRIC, CHUNKS, tokens).emit)
    return str(target.emit_assembly(module))


def panel_code(board: str, bits: int, mode16: bool) -> tuple[str, str | None, str]:
    """What products of many rows are made of: what unpacks weights for a panel, what puts a tile's activations in the order of
    octets where there are those, and the tile."""
    index = [each.name for each in all_isas()].index(CORES[board].isas[0])
    tile = tile_of_panel(IntegerWeights(index, bits, int(mode16), SYMMETRIC, CHUNKS), TOKENS)

    def text(emit: Callable[..., None], arguments: int) -> str:
        target, module = compiled(CORES[board], emit, arguments=arguments)
        return str(target.emit_assembly(module))

    unpack = text(lambda b, *values: tile.emit_unpacked(b, *values[:5]), 5)
    reorder = text(lambda b, *values: tile.emit_octets(b, *values[:3]), 3) if isinstance(tile, OctetTile) else None
    return (
        unpack,
        reorder,
        text(lambda b, *values: tile.emit_chunks(b, values[0], values[1], values[2], values[3], values[4:8], values[8:12]), 12),
    )


_BRANCH = re.compile(r"(?:b\.\w+|cbn?z\s+\w+,|tbn?z\s+\w+,.*,)\s*(\.L\w+)")


@dataclass(frozen=True)
class Loops:
    """Instructions by mnemonic: `inner` of the loop over chunks, the last of `passes` where there are several; `outer` around
    them, once per activation block; all `calls`."""

    passes: tuple[Counter[str], ...]
    outer: Counter[str]
    calls: tuple[str, ...]

    @property
    def inner(self) -> Counter[str]:
        return self.passes[-1]


def loops(text: str) -> Loops:
    """The loops of a tile's assembly.  Blocks that branch to themselves are the loops over chunks; all else after the first
    label is counted once per activation block, a few instructions too many.  ValueError: there is no loop.
    """
    lines = [line.split("//")[0].strip() for line in text.splitlines()]
    label, labels, inner = 0, list[int](), list[tuple[int, int]]()
    for i, line in enumerate(lines):
        if re.fullmatch(r"\.L\w+:", line):
            label = i
            labels.append(i)
        elif labels and (match := _BRANCH.fullmatch(line)) and lines[label] == match[1] + ":":
            inner.append((label, i))
    if not inner:
        raise ValueError("the tile has no loop over chunks")
    called = tuple(line for line in lines if re.match(r"(bl|blr)\b", line))
    passes = tuple(_count(lines[start : end + 1]) for start, end in inner)
    outer = _count(lines[labels[0] :])
    for each in passes:
        outer -= each
    return Loops(passes, outer, called)


def _count(lines: list[str]) -> Counter[str]:
    """Instructions by mnemonic; the mnemonics of vector instructions begin with "v."."""
    found: Counter[str] = Counter()
    for line in lines:
        if not line or line.startswith(".") or line.endswith(":"):
            continue
        name, _, operands = line.partition("\t")
        found[("v." if re.match(r"v\d+\.", operands.strip()) else "") + name] += 1
    return found


def cycles(core: Core, instructions: Counter[str]) -> float:
    """Cycles of these instructions on one core; see `Core`."""
    vector = sum(count for name, count in instructions.items() if name.startswith("v."))
    loads = sum(count * (2 if name == "ldp" else 1) for name, count in instructions.items() if name.startswith("ld"))
    single = [sum(instructions[f"v.{name}"] for name in names) for names in core.single.values()]
    return max(sum(instructions.values()) / core.width, vector / core.pipes, loads / core.loads, *map(float, single))


@cache
def block_cost(board: str, bits: int, mode16: bool, group: int) -> tuple[float, float]:
    """Cycles, and instructions, per byte of stored weights and scales, for one token."""
    core = CORES[board]
    found = loops(assembly(board, bits, mode16))
    codec = Codec("int", bits, group)
    block = activation_block(codec)
    inner = Counter({name: count * (block // CHUNK) for name, count in found.inner.items()})
    nbytes = codec.nbytes(ROWS, block)
    # The two parts run one after the other.
    spent = block // CHUNK * cycles(core, found.inner) + cycles(core, found.outer)
    return spent / nbytes, (sum(inner.values()) + sum(found.outer.values())) / nbytes


@dataclass(frozen=True)
class Row:
    """One line of the table: tokens per second, all computed.

    compute          from instructions, by number of threads
    memory           from the highest bandwidth that was measured on the board
    memory_reached   from the bandwidth that the best published runtime reached
    """

    board: str
    model: str
    weights: str
    mode: str
    gigabytes: float
    instructions: float
    compute: dict[int, float]
    memory: float
    memory_reached: float | None


def row(board: str, model: str, bits: int, group: int, mode: str) -> Row:
    """The line of one case."""
    config = MODELS[model]
    parts = [
        (Codec("int", bits, group), sum(rows for rows, _ in shapes.values()), next(iter(shapes.values()))[1])
        for layer in range(config.num_hidden_layers)
        for _, shapes in fused_shapes(config, layer)
    ]
    parts.append((Codec("int", 8, group), config.vocab_size, config.hidden_size))
    nbytes = [codec.nbytes(rows, columns) for codec, rows, columns in parts]
    costs = [block_cost(board, codec.bits, mode == "a16", group) for codec, _, _ in parts]
    seconds = sum(n * spent for n, (spent, _) in zip(nbytes, costs, strict=True)) / CORES[board].hertz
    instructions = sum(n * count for n, (_, count) in zip(nbytes, costs, strict=True)) / sum(nbytes)
    total = sum(nbytes)
    return Row(
        board, model, f"i{bits} g{group}, head i8", mode, total / 1e9, instructions,
        {threads: threads / seconds for threads in (1, 2, 4)}, CEILING[board] / total,
        REACHED[board] / total if board in REACHED else None,
    )  # fmt: skip


@dataclass(frozen=True)
class PromptRow:
    """One line of the table of prompts, all computed.

    compute  tokens per second by number of threads
    share    of the time in which the pipelines that multiply do so
    """

    board: str
    isa: str
    panels: bool
    weights: str
    mode: str
    compute: dict[int, float]
    share: float


@cache
def chunk_cycles(board: str, panels: bool, bits: int, mode16: bool, group: int) -> tuple[float, float]:
    """Cycles of a chunk of a block, 512 weights, for a token of a long prompt; and those of its multiplications alone.

    panels  by panels, and not by tiles that unpack for themselves
    """
    core, chunks = CORES[board], activation_block(Codec("int", bits, group)) // CHUNK
    once = 0.0
    if panels:
        unpack, reorder, text = panel_code(board, bits, mode16)
        once = cycles(core, loops(unpack).inner) / PANEL
        once += cycles(core, loops(reorder).inner) / TOKENS / GROUP_BLOCKS if reorder else 0
        found = loops(text)
    else:
        found = loops(assembly(board, bits, mode16, TOKENS))
    inner = sum(cycles(core, each) for each in found.passes)
    products: Counter[str] = sum(
        (Counter({name: each[f"v.{name}"] for name in MULTIPLIES}) for each in found.passes), Counter()
    )
    pipes = 1 if any(name in products for name in core.single.get("multiply", ())) else core.pipes
    return once + (inner + cycles(core, found.outer) / chunks) / TOKENS, products.total() / pipes / TOKENS


def prompt_row(board: str, panels: bool, bits: int, group: int, mode: str) -> PromptRow:
    """The line of one case: Llama-3.2-1B, whose head computes the last token of a prompt alone."""
    config = MODELS["Llama-3.2-1B"]
    shapes = [
        shape for layer in range(config.num_hidden_layers) for _, each in fused_shapes(config, layer) for shape in each.values()
    ]
    spent, multiplied = chunk_cycles(board, panels, bits, mode == "a16", group)
    seconds = spent * sum(rows * columns for rows, columns in shapes) / (ROWS * CHUNK) / CORES[board].hertz
    speeds = {threads: threads / seconds for threads in (1, 4)}
    isa = CORES[board].isas[0 if panels else -1]
    return PromptRow(board, isa, panels, f"i{bits} g{group}", mode, speeds, multiplied / spent)


def prompts() -> list[PromptRow]:
    """All cases of the second table of docs/arm.md, without panels and with them."""
    cases = list(itertools.product(CORES, (False, True)))
    return [prompt_row(*case, bits, 128, mode) for case in cases for bits in (4, 8) for mode in ("a8", "a16")]


def markdown_of_prompts(rows: list[PromptRow]) -> str:
    """The second table of docs/arm.md."""
    lines = [
        "| board | instruction set | weights unpacked | weights | mode | 1 / 4 threads | multiplications' share |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        compute, unpacked = " / ".join(f"{value:.1f}" for value in r.compute.values()), PANEL if r.panels else TOKENS
        cells = (r.board, f"`{r.isa}`", f"for {unpacked} tokens", r.weights, r.mode, compute, f"{r.share:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table() -> list[Row]:
    """All cases of the first table of docs/arm.md."""
    cases = itertools.product(CORES, MODELS, (128, 32), ("a8", "a16"))
    return [row(board, model, 4, group, mode) for board, model, group, mode in cases]


def markdown(rows: list[Row]) -> str:
    """The first table of docs/arm.md."""
    lines = [
        "| board | model | weights | mode | GB per token | instructions per byte | instructions allow, 1 / 2 / 4 threads "
        "| memory allows | at the bandwidth others reached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        compute = " / ".join(f"{value:.1f}" for value in r.compute.values())
        cells = (r.board, r.model, r.weights, r.mode, f"{r.gigabytes:.2f}", f"{r.instructions:.2f}", compute, f"{r.memory:.1f}")
        lines.append(f"| {' | '.join(cells)} | {f'{r.memory_reached:.1f}' if r.memory_reached else ''} |")
    return "\n".join(lines)


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of markdown.")
def main(as_json: bool) -> None:
    """Print the computed rooflines of some Arm processors, in tokens per second: of decode, then of prompts."""
    rows, of_prompts = table(), prompts()
    if as_json:
        found = {"decode": [asdict(r) for r in rows], "prompts": [asdict(r) for r in of_prompts]}
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(f"{markdown(rows)}\n\n{markdown_of_prompts(of_prompts)}")


if __name__ == "__main__":
    main()
