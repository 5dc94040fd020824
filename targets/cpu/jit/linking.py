"""Object files of kernels as machine code of this process, without LLVM, whose library takes 47 MB of memory and 0.1 s to load.

LLVM puts the large code model into them, which reaches everything by whole addresses: four kinds of relocation on x86 and Arm.
What is not an ELF file (macOS), or has another kind, is left to LLVM.

References: System V ABI, chapter 4 (object files); "ELF x86-64-ABI psABI" §4.4; "ELF for the Arm 64-bit Architecture" §5.7.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_HEADER, _SECTION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")
_SYMBOL, _RELOCATION = struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_RELOCATABLE, _X86, _ARM = 1, 62, 183
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8
_WRITTEN, _IN_MEMORY = 1, 2
_UNDEFINED, _ABSOLUTE = 0, 0xFFF1

_WHOLE_ADDRESS = {(_X86, 1), (_ARM, 257)}
_DISTANCE = {(_X86, 24), (_ARM, 260)}
"""64 bits from the place that is written."""
_SIXTEEN_BITS = {(_ARM, 263 + i): bits for i, bits in enumerate([0, 0, 16, 16, 32, 32, 48])}
"""MOVZ and MOVK: which bits of an address they take."""
_BRANCH = {(_ARM, 282), (_ARM, 283)}
_BRANCH_REACHES = 1 << 27

_FAR = struct.Struct("<IIQ")
_LOAD_X16, _JUMP_X16 = 0x58000050, 0xD61F0200
"""`ldr x16, #8` and `br x16`, before the address of a function that a branch does not reach."""

_NONE, _FIXED = 0, 0x10
_libc = ctypes.CDLL(None, use_errno=True)


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class _Unknown(Exception):
    """The object file has what only LLVM knows."""


def address_of(name: str) -> int | None:
    """Address of a function of the C library, or of another that is loaded for all; None: there is none."""
    with suppress(AttributeError):
        return ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value
    return None


def linked(code: bytes, symbol: str) -> int | None:
    """Address of the function `symbol` of an object file, whose code stays in memory; None: it is left to LLVM.

    Nothing is ever writable and executable: the code is written into a file in memory, which is mapped as shared libraries are.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return _Object(code).placed(symbol)
    # OSError: a system that allows no code in such files.  The others: numbers that lead out of the object file.
    except (_Unknown, OSError, struct.error, LookupError, ValueError, OverflowError, StopIteration):
        return None


class _Object:
    """An object file of this machine's architecture."""

    def __init__(self, code: bytes) -> None:
        magic, kind, self.machine, _, _, _, sections, _, _, _, _, size, count, _ = _HEADER.unpack_from(code)
        if magic[:6] != b"\x7fELF\2\1" or kind != _RELOCATABLE or self.machine != _this_machine() or size != _SECTION.size:
            raise _Unknown
        self.code = code
        self.sections = [_Section(*_SECTION.unpack_from(code, sections + i * size)) for i in range(count)]
        table = [each for each in self.sections if each.kind == _SYMBOLS]
        if len(table) != 1:
            raise _Unknown
        self.symbols = list(_SYMBOL.iter_unpack(self._bytes(table[0])))
        self.names = self._bytes(self.sections[table[0].link])

    def _bytes(self, section: _Section) -> bytes:
        found = self.code[section.offset : section.offset + section.size]
        if len(found) != section.size:
            raise _Unknown
        return found

    def _name(self, at: int) -> str:
        return self.names[at : self.names.index(b"\0", at)].decode("ascii", "replace")

    def placed(self, symbol: str) -> int:
        """Address of `symbol`, with all sections in memory and everything in them pointing where it should."""
        contents = {i: self._content(each) for i, each in enumerate(self.sections) if each.flags & _IN_MEMORY}
        outside = dict(self._outside())
        places: dict[int, int] = {}
        size = 0
        for i, content in contents.items():
            places[i] = _up_to(size, self.sections[i].alignment)
            size = places[i] + len(content)
        first_jump = _up_to(size, _FAR.size)
        jumps = {each: first_jump + i * _FAR.size for i, each in enumerate(outside)}
        image = bytearray(first_jump + len(jumps) * _FAR.size)
        for i, content in contents.items():
            image[places[i] : places[i] + len(content)] = content
        for i, place in jumps.items():
            _FAR.pack_into(image, place, _LOAD_X16, _JUMP_X16, outside[i])

        reserved = _map(None, len(image), _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        try:
            addresses = outside | {
                i: value if section == _ABSOLUTE else reserved + places[section] + value
                for i, (_, _, _, section, value, _) in enumerate(self.symbols)
                if section == _ABSOLUTE or section in places
            }
            for section in self.sections:
                if section.kind == _RELOCATIONS and section.info in places:
                    for offset, about, addend in _RELOCATION.iter_unpack(self._bytes(section)):
                        kind, to = about & 0xFFFFFFFF, about >> 32
                        at, target = places[section.info] + offset, addresses[to] + addend
                        self._relocate(image, reserved, at, kind, target, jumps.get(to))
            entry = next(addresses[i] for i in addresses.keys() - outside.keys() if self._name(self.symbols[i][0]) == symbol)
            _put(reserved, image)
        except BaseException:
            _libc.munmap(ctypes.c_void_p(reserved), ctypes.c_size_t(len(image)))
            raise
        return int(entry)

    def _content(self, section: _Section) -> bytes:
        """What a section has in memory."""
        if section.kind == _NO_BITS or section.flags & _WRITTEN or section.alignment > mmap.PAGESIZE:
            raise _Unknown
        return self._bytes(section)

    def _outside(self) -> Iterator[tuple[int, int]]:
        """Numbers of the symbols that are functions of the process, and their addresses."""
        for i, (name, _, _, shndx, _, _) in enumerate(self.symbols):
            if i and shndx == _UNDEFINED:
                address = address_of(self._name(name))
                if address is None:
                    raise _Unknown
                yield i, address

    def _relocate(self, image: bytearray, base: int, at: int, kind: int, target: int, jump: int | None) -> None:
        """Write `target` into the image at `at`.  jump: place of the code that jumps there from near by."""
        of = self.machine, kind
        if of in _WHOLE_ADDRESS:
            struct.pack_into("<Q", image, at, target & (1 << 64) - 1)
        elif of in _DISTANCE:
            struct.pack_into("<q", image, at, target - base - at)
        elif of in _SIXTEEN_BITS:
            (word,) = struct.unpack_from("<I", image, at)
            struct.pack_into("<I", image, at, word & ~(0xFFFF << 5) | (target >> _SIXTEEN_BITS[of] & 0xFFFF) << 5)
        elif of in _BRANCH:
            distance = (target if jump is None else base + jump) - base - at
            if distance & 3 or not -_BRANCH_REACHES <= distance < _BRANCH_REACHES:
                raise _Unknown
            (word,) = struct.unpack_from("<I", image, at)
            struct.pack_into("<I", image, at, word & ~0x3FFFFFF | distance >> 2 & 0x3FFFFFF)
        else:
            raise _Unknown


def _up_to(size: int, alignment: int) -> int:
    """The next multiple; 0 and 1: any place will do."""
    return -(-size // max(alignment, 1)) * max(alignment, 1)


def _this_machine() -> int:
    return {"x86_64": _X86, "aarch64": _ARM}.get(os.uname().machine, -1)


def _map(address: int | None, size: int, protection: int, flags: int, file: int) -> int:
    _libc.mmap.restype = ctypes.c_void_p
    found = _libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), protection, flags, file, ctypes.c_long(0))
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)


def _put(address: int, image: bytearray) -> None:
    """Machine code at an address that is reserved; through a file, so that the operating system sees to Arm's caches."""
    file = os.memfd_create("edgeq-kernel")
    try:
        written = memoryview(image)
        while written:
            written = written[os.write(file, written) :]
        _map(address, len(image), mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE | _FIXED, file)
    finally:
        os.close(file)
