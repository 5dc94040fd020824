"""What of a block of weights changes the inner loop of a fused product."""

from dataclasses import dataclass
from functools import cached_property

from edgeq.targets.cuda.kernels.product import arithmetic
from edgeq.targets.cuda.kernels.prologue import WARPS
from edgeq.targets.cuda.kernels.quantize_input import quantize_block
from edgeq.targets.cuda.kernels.turns import LINE
from edgeq.targets.cuda.kernels.weights import WeightForm


@dataclass(frozen=True)
class BlockCodec:
    """What of a block of weights changes the inner loop; of a round: `steps` of one group, or of a chunk that is two."""

    rule: str
    bits: int
    beside: bool | str
    integer: bool
    group: int

    @cached_property
    def inlines(self):
        put = quantize_block(self.rule, self.integer, self.group)
        return put, *self.weights.inlines, *arithmetic(self.weights)

    @cached_property
    def weights(self):
        return WeightForm(self.bits, self.beside, self.integer, self.group)

    @property
    def sum(self):
        return "uint32" if self.integer else "float32"

    @property
    def chunks(self):
        """Chunks of a step."""
        return max(1, self.group // 32)

    @property
    def parts(self):
        """Groups of a step."""
        return 2 if self.group == 16 else 1

    @property
    def steps(self):
        return 2 * WARPS if self.group == 128 else 4 * WARPS

    @property
    def groups(self):
        return self.steps * self.parts

    @property
    def loaded(self):
        """Registers of the weights of a round that a lane reads for an output block."""
        return self.steps // WARPS * self.chunks * self.weights.words

    @property
    def numbers(self):
        """Scales, of two output channels, that a lane reads for it."""
        return self.steps // WARPS * self.parts * 2

    @property
    def stored(self):
        """Words of weights of an output block."""
        return self.steps * self.chunks * self.bits * 16

    def whole(self, steps, groups, chunks):
        """Whether so many steps have all of their groups and chunks; a chunk of two groups may have one at the end."""
        return steps * 2 <= groups if self.group == 16 else steps * self.chunks <= chunks

    @property
    def asking(self):
        """Warps that have a thread for each line of the weights of an output block, one more where they begin within a line."""
        lines = -(-(self.stored + (16 if self.bits % 2 else 0)) // (LINE // 4))
        return next(warps for warps in (1, 2, WARPS) if lines <= 32 * warps)

    @property
    def takers(self):
        """How many times so many warps a block of threads has: they take turns."""
        return WARPS // self.asking

    @property
    def words(self):
        """Words of a chunk of the quantized input of one token."""
        return 8 if self.integer else 16
