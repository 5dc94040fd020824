"""NVIDIA's run-time compiler from the package index: CUDA text to machine code of a GPU, without a GPU or a driver."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgeq.errors import ResourceError, UnsupportedError
from edgeq.targets.cuda.supply import nvrtc_process
from edgeq.targets.cuda.supply.nvrtc_process import compile_text, loaded
from edgeq.targets.cuda.supply.pack import Generated

PREAMBLE = """#include <cuda_fp16.h>
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
"""
"""What the text of a kernel needs before it; NVRTC has no C library."""
VIRTUAL = "compute_80"
"""The architecture of PTX, which a driver compiles for GPUs that are newer than this compiler."""
COMPILED_FOR = (80, 86, 87, 89, 90)
"""Compute capabilities for which NVRTC 12.6 makes machine code; newer GPUs get PTX."""
MAX_REGISTERS = 255
BF16 = "#include <cuda_bf16.h>\n"


def arch_for(sm: int) -> str:
    """What is compiled for a GPU of a compute capability."""
    return f"sm_{sm}" if sm in COMPILED_FOR else VIRTUAL


def folders() -> list[Path]:
    """The folders of the installed packages of NVIDIA."""
    found = importlib.util.find_spec("nvidia")
    return [Path(path) for path in found.submodule_search_locations or ()] if found else []


def installed(pattern: str) -> Path | None:
    return next((path for folder in folders() for path in sorted(folder.glob(pattern))), None)


def refusal() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    if installed("cuda_nvrtc/lib/libnvrtc.so.12") and installed("cuda_runtime/include/cuda_fp16.h"):
        return None
    return "NVRTC is not installed; run: pip install edgeq[build]"


@cache
def library() -> ctypes.CDLL:
    return loaded(str(installed("cuda_nvrtc/lib/libnvrtc.so.12")))


@dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture.

    image       machine code, or PTX where the architecture is a virtual one; its numbers are 0 there
    shared      bytes of shared memory of a block
    spilled     bytes that a thread keeps in memory: registers, and arrays whose indices are not constant
    """

    arch: str
    image: bytes
    registers: int = 0
    shared: int = 0
    spilled: int = 0


def compiled(generated: Generated, arch: str) -> Compiled:
    """A kernel for `sm_87` or `compute_80`, by this process.

    UnsupportedError, with the compiler's words: it does not compile for it.
    """
    image, log = compile_text(library(), **_task(generated, arch))
    return _result(generated, arch, image, log)


def reproduced(generated: Generated, arch: str) -> Compiled:
    """The same by a process of its own, which gives the same bytes each time (nvrtc_process.py); it takes 0.2 s more."""
    task = json.dumps({"library": str(installed("cuda_nvrtc/lib/libnvrtc.so.12")), **_task(generated, arch)})
    command = [sys.executable, "-I", "-S", nvrtc_process.__file__]
    done = subprocess.run(command, input=task.encode(), capture_output=True, env={})
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        reason = words[-1] if words else f"exit code {done.returncode}"
        raise ResourceError(f"the process that compiled {generated.variant.symbol} ended: {reason}")
    image, log = json.loads(done.stdout)
    return _result(generated, arch, None if image is None else bytes.fromhex(image), log)


def _task(generated: Generated, arch: str) -> dict[str, str]:
    text = (BF16 if "bfloat16" in generated.text else "") + PREAMBLE + generated.text
    return {"include": str(installed("cuda_runtime/include")), "name": generated.name, "text": text, "arch": arch}


def _result(generated: Generated, arch: str, image: bytes | None, log: str) -> Compiled:
    if image is None:
        raise UnsupportedError(f"kernel {generated.variant.symbol} does not compile for {arch}: {log.strip()}")
    if arch.startswith("compute_"):
        return Compiled(arch, image)
    registers, shared = (re.search(pattern, log) for pattern in (r"Used (\d+) registers", r"(\d+) bytes smem"))
    spilled = sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", log)))
    return Compiled(arch, image, int(registers[1]) if registers else MAX_REGISTERS, int(shared[1]) if shared else 0, spilled)
