"""The machine code that LLVM makes of tiles for x86, compiled on whatever runs the tests."""

from __future__ import annotations

import re
from collections.abc import Callable

import llvmlite.binding as llvm
from llvmlite import ir

TRIPLE = "x86_64-unknown-linux-gnu"


def optimized(
    emit: Callable[..., None], arguments: int, cpu: str, flags: str = ""
) -> tuple[llvm.TargetMachine, llvm.ModuleRef]:
    """LLVM's code generator for a processor, and a module with the function `tile` of so many int64."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module("tile")
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * arguments), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, *function.args)
    builder.ret_void()
    target = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=cpu, features=flags, opt=3)
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return target, parsed


def compiled(emit: Callable[..., None], arguments: int, cpu: str, flags: str = "") -> list[str]:
    """Instructions and labels, in order."""
    target, module = optimized(emit, arguments, cpu, flags)
    lines = [line.split("#")[0].strip() for line in str(target.emit_assembly(module)).splitlines()]
    return [line for line in lines if line and not re.match(r"\.(?!L)", line)]


def inner(lines: list[str]) -> list[str]:
    """The loop over chunks, or over blocks of one: the only block that branches to itself."""
    start = 0
    for i, line in enumerate(lines):
        if line.endswith(":"):
            start = i
        elif line.startswith("j") and line.split()[-1] + ":" == lines[start]:
            return lines[start + 1 : i + 1]
    raise ValueError("there is no loop")


def inner_loops(lines: list[str]) -> list[list[str]]:
    """All loops that have no loop within, of one block or more."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    back = [(labels[to], i) for i, line in enumerate(lines) if line[0] == "j" and labels.get(to := line.split()[-1], i) < i]
    innermost = [
        loop for loop in back if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in back)
    ]
    return [[line for line in lines[start : stop + 1] if not line.endswith(":")] for start, stop in innermost]
