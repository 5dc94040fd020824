"""Object files of kernels in memory, without LLVM."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeq.targets.cpu.jit import compile, linking, pipeline
from edgeq.targets.cpu.jit.compile import ARGUMENTS
from edgeq.targets.cpu.jit.deferred import SYMBOL, ObjectFile
from edgeq.targets.cpu.kernels.rows.norms import scale

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="kernels are linked by LLVM here")


@pytest.fixture(scope="module")
def code() -> bytes:
    return pipeline.compiled(scale(), ARGUMENTS).code


LINKED_ALONE = """
import sys
from pathlib import Path
from edgeq.targets.cpu.jit import compile
from edgeq.targets.cpu.kernels.rows.norms import scale
compile.cache_folder = lambda: Path(sys.argv[1])
assert compile.address(scale)
assert "libllvmlite" not in Path("/proc/self/maps").read_text()
"""


def test_a_kept_kernel_needs_no_llvm(tmp_path: Path) -> None:
    compile.keep(tmp_path, scale)
    subprocess.run([sys.executable, "-c", LINKED_ALONE, str(tmp_path)], check=True)


def test_code_is_never_writable(code: bytes) -> None:
    address = linking.linked(code, SYMBOL)
    assert address
    (mapping,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if _holds(line, address)]
    assert mapping.split()[1] == "r-xp"


def _holds(mapping: str, address: int) -> bool:
    first, last = (int(each, 16) for each in mapping.split()[0].split("-"))
    return first <= address < last


def test_what_is_not_known_is_left_to_llvm(code: bytes) -> None:
    sections = linking._Object(code).sections
    (headers,) = struct.unpack_from("<Q", code, 40)
    kind, written = bytearray(code), bytearray(code)
    struct.pack_into("<I", kind, next(each.offset for each in sections if each.kind == linking._RELOCATIONS) + 8, 2)
    for i, section in enumerate(sections):
        struct.pack_into("<Q", written, headers + i * linking._SECTION.size + 8, section.flags | linking._WRITTEN)
    wrong = [b"", code[:100], code[:-1], b"\xcf\xfa\xed\xfe" + code[4:], kind, written, code.replace(b"kernel", b"kernal")]
    assert [linking.linked(bytes(each), SYMBOL) for each in wrong] == [None] * len(wrong)
    before = len(compile._kept)
    assert compile._loaded(ObjectFile(code, [])) and len(compile._kept) == before


def test_mutated_object_files_are_placed_or_left(code: bytes) -> None:
    random.seed(0)
    (headers,) = struct.unpack_from("<Q", code, 40)
    found = []
    for trial in range(200):
        wrong = bytearray(code)
        for _ in range(1 + trial % 4):
            wrong[random.randrange(headers if trial % 2 else 0, len(code))] ^= 1 << random.randrange(8)
        found.append(linking.linked(bytes(wrong), SYMBOL))
    assert 0 < found.count(None) < 200


@pytest.mark.parametrize("target", [0x0000_7F12_3456_789A, 0xFFFF_FFFF_FFFF_FFFF, 0])
def test_addresses_in_instructions_of_arm(target: int) -> None:
    """MOVZ and MOVK of x9 take 16 bits each; the rest of the instruction stays."""
    instructions = [0xD2800009, 0xF2A00009, 0xF2C00009, 0xF2E00009]
    image = bytearray(struct.pack("<4I", *instructions))
    arm = linking._Object.__new__(linking._Object)
    arm.machine = linking._ARM
    for i, kind in enumerate([264, 266, 268, 269]):
        arm._relocate(image, 0, 4 * i, kind, target, None)
    words = np.frombuffer(image, np.uint32).tolist()
    assert sum((word >> 5 & 0xFFFF) << 16 * i for i, word in enumerate(words)) == target
    assert [word & ~(0xFFFF << 5) for word in words] == instructions


def test_branches_of_arm() -> None:
    """`bl` to what is near, to what is near only through a jump, and to what is too far."""
    arm = linking._Object.__new__(linking._Object)
    arm.machine, base = linking._ARM, 1 << 40
    image = bytearray(struct.pack("<2I", 0x94000000, 0x94000000))
    arm._relocate(image, base, 4, 283, base, None)
    arm._relocate(image, base, 0, 283, 1 << 20, 64)
    assert struct.unpack("<2I", image) == (0x94000010, 0x97FFFFFF)
    with pytest.raises(linking._Unknown):
        arm._relocate(image, base, 0, 283, 1 << 20, None)
