"""What an instruction set is to the kernels, which are written once over it: how it multiplies packed integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

X86_PREFETCH_DISTANCES = (16 << 10, 4 << 10, 1 << 10)
"""Far: what a processor foresees itself ends with a small page.  Near: a Zen 4 reads a 1B shape 1.25 times as fast so.
Between: a Zen 3 reads matrices of 0.2 to 1 MB, in groups of 32, 4 % faster than near and up to 3 % faster than far."""


def by_chunks(isa: Isa) -> bool:
    """Whether what it multiplies is measured as panels of 16-bit sums do it, a chunk at a time."""
    return isa.sums_16 and not isa.signs


class Isa(Protocol):
    """Emits LLVM IR for integer dot products over the file's order (edgeq/format/codec.py).

    A *quad* is `lanes` rows x 4 channels of unsigned bytes in one vector.  An accumulator is <lanes x i32>, one lane a row.

    name        by which `isa` asks for it
    label       what people call it; sets that need the same instructions share it
    lanes       rows of a block that one vector holds: 16, or 8 or 4 and a block takes two or four
    tiles       tokens multiplied at once, largest first, ending in 1: what the registers hold
    chains      sums for each vector of rows of a token alone, which has no other to hide the latency of a dot product behind
    blocks_per_tile  neighbouring blocks that share what is loaded of the tokens, where one alone leaves registers free
    prefetch_distances  how many bytes ahead weights may be asked for into the second-level cache, of which a probe chooses; the
                     first where nothing is measured.  Empty leaves that to the processor
    machines    what `platform.machine()` says of the processors it is for; empty for all
    needs       processor features without which the code would not run
    matrix_unit whether products with many rows go to a unit that multiplies whole tiles (matrix_unit.py)
    winograd    whether products of 4-bit weights and 8-bit activations go by Winograd's method (winograd.py)
    shifts_bytes  whether one instruction shifts every byte of a vector
    folds_indices  whether `looked_up` takes no notice of bits 4 to 6 of an index
    panels      whether products with several rows unpack weights first, once for all of a panel (panel_matmul.py)
    signs       whether what is unpacked becomes int8 then; then also `signed` with `dot_signed` or `dot_octets`
    sums_16     whether products are added up in 16 bits first: within `dot_signed` where the set `signs`, else by `run`,
                `pairs16` and `widened`, of which `dot8` is made
    octets      whether one instruction multiplies two tokens by two rows, eight channels of each (octet_tile.py)
    """

    name: str
    label: str
    lanes: int
    tiles: tuple[int, ...]
    machines: frozenset[str]
    needs: frozenset[str]
    chains: int = 1
    blocks_per_tile: int = 1
    prefetch_distances: tuple[int, ...] = ()
    matrix_unit: bool = False
    winograd: bool = False
    shifts_bytes: bool = False
    folds_indices: bool = False
    panels: bool = False
    signs: bool = False
    sums_16: bool = False
    octets: bool = False

    def missing(self, features: frozenset[str]) -> list[str]:
        """What a processor with these features lacks, in alphabetical order."""
        return sorted(self.needs - features)

    def runs_on(self, arch: str, features: frozenset[str]) -> bool:
        """Whether a processor of this architecture, as `platform.machine()` says, runs its code."""
        return (not self.machines or arch in self.machines) and not self.missing(features)

    def offset(self, bits: int) -> int:
        """What `dot8` subtracts from every weight before it multiplies; the tile adds it back through the sum of x."""
        return 0

    def dot8(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        """accumulator + sum over quads of 4 products; tokens are <lanes x i32> splats of 4 int8 channels, -128 ... 127."""
        ...

    def looked_up(self, b: Any, table: Any, index: Any) -> Any:
        """Bytes `table`[index]: indices are bytes below 16, or below 128 where the set `folds_indices`, the table the same 16
        bytes over and over, in vectors of a quad."""
        ...

    def takes_pairs(self, bits: int) -> bool:
        """Whether 16-bit activations go to `dot16`, for weights of so many bits, instead of in two bytes to `dot8`."""
        return False

    def widens(self, bits: int) -> bool:
        """Whether 8-bit activations go to `dot16` as well, for weights of so many bits, stored in 16 bits."""
        return False

    def run(self, bits: int) -> int:
        """Quads whose products `pairs16` may add up before `widened`."""
        raise AssertionError(f"{self.name} adds products in 32 bits")

    def pairs16(self, b: Any, total: Any, quad: Any, token: Any) -> Any:
        """Sums of products in 16 bits: `total`, None for none yet, + the products of a quad."""
        raise AssertionError(f"{self.name} adds products in 32 bits")

    def widened(self, b: Any, accumulator: Any, total: Any) -> Any:
        """accumulator + such sums."""
        raise AssertionError(f"{self.name} adds products in 32 bits")

    def signed(self, b: Any, quad: Any, bits: int) -> Any:
        """Unpacked bytes as int8, `offset` less."""
        raise AssertionError(f"{self.name} multiplies unsigned weights")

    def dot_signed(self, b: Any, accumulator: Any, quads: Sequence[Any], tokens: Sequence[Any], bits: int) -> Any:
        """As `dot8`, of weights that are `signed` already."""
        raise AssertionError(f"{self.name} multiplies unsigned weights")

    def dot_octets(self, b: Any, accumulator: Any, tokens: Any, weights: Any) -> Any:
        """accumulator, <4 x i32>, + the sums of eight products: token 0 by row 0, 0 by 1, 1 by 0, 1 by 1.  tokens, weights: of
        two tokens or rows eight channels each, int8."""
        raise AssertionError(f"{self.name} has no products of octets")

    def dot16(self, b: Any, accumulator: Any, pairs: Any, token: Any) -> Any:
        """accumulator + two products per lane: `pairs` and `token` hold two int16 each, not all of them -2^15."""
        raise AssertionError(f"{self.name} takes the bytes of 16-bit activations")
