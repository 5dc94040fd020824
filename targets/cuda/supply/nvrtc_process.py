"""NVRTC by its C functions; run as a program, in a process that does nothing else.

What NVRTC makes of one text depends on the order of addresses in its memory: 2 of 10 compilations of one kernel in one process
gave other PTX.  A process with nothing before it, no environment, and addresses that are not random gives the same each time.
So this file imports nothing of edgeq, whose imports would come before.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

NOT_RANDOM = 0x0040000
"""ADDR_NO_RANDOMIZE of personality(2)."""
AGAIN = "again"


def loaded(path: str) -> ctypes.CDLL:
    """The library at `path`, with its built-in functions, which it looks for by name."""
    for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path)


def compile_text(nvrtc: ctypes.CDLL, include: str, name: str, text: str, arch: str) -> tuple[bytes | None, str]:
    """Machine code or PTX, None where it does not compile; and the compiler's words."""
    program = ctypes.c_void_p()
    flags = [f"--gpu-architecture={arch}", "-default-device", "-std=c++17", f"-I{include}", "--ptxas-options=-v"]
    values = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    failed = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    failed = failed or nvrtc.nvrtcCompileProgram(program, len(flags), values)
    log = _fetched(nvrtc, program, "ProgramLog").decode(errors="replace")
    image = None
    if not failed:
        # Of PTX without its last byte, which ends a C string.
        virtual = arch.startswith("compute_")
        image = _fetched(nvrtc, program, "PTX").rstrip(b"\0") if virtual else _fetched(nvrtc, program, "CUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image, log


def _fetched(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    if getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) or not size.value:
        return b""
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data.raw


def main() -> None:
    """Reads library, include, name, text and arch as JSON; writes the image in hexadecimal, or null, and the words, as JSON."""
    if AGAIN not in sys.argv:
        libc = ctypes.CDLL(None)
        # It holds for what is executed from now on.  Where a container forbids it, addresses stay random.
        libc.personality(libc.personality(0xFFFFFFFF) | NOT_RANDOM)
        os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, AGAIN], {})
    asked = json.loads(sys.stdin.buffer.read())
    library = loaded(asked.pop("library"))
    image, log = compile_text(library, **asked)
    print(json.dumps([image.hex() if image is not None else None, log]))


if __name__ == "__main__":
    main()
