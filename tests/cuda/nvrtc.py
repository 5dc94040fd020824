"""NVIDIA's run-time compiler from the package index: CUDA text to machine code of a GPU, without a GPU or a driver."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgeq.targets.cuda.pack import Generated

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
    path = installed("cuda_nvrtc/lib/libnvrtc.so.12")
    assert path is not None
    for builtins in path.parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


@dataclass(frozen=True)
class Compiled:
    """spilled   bytes of registers that a thread keeps in memory instead"""

    cubin: bytes
    registers: int
    spilled: int


def compiled(generated: Generated, sm: int) -> Compiled:
    """Machine code for one compute capability.  ValueError, with the compiler's words: it does not compile."""
    nvrtc, program, headers = library(), ctypes.c_void_p(), installed("cuda_runtime/include")
    text = (PREAMBLE + generated.text).encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, generated.name.encode(), 0, None, None)
    flags = [f"--gpu-architecture=sm_{sm}", "-default-device", "-std=c++17", f"-I{headers}", "--ptxas-options=-v"]
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags)))
    log = fetched(program, "ProgramLog").decode(errors="replace")
    if failed:
        raise ValueError(log)
    cubin = fetched(program, "CUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Compiled(
        cubin, int(re.findall(r"Used (\d+) registers", log)[0]), sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    )


def fetched(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(library(), f"nvrtcGet{what}")(program, data)
    return data.raw
