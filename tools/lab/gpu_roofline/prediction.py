"""What a decoded token takes on an NVIDIA GPU, predicted launch by launch; nothing of it is measured.

A launch ends when the slowest of three has: its bytes at a share of the memory's peak bandwidth; the chain of what a block of
threads does one after another, in as many waves as there are places for; and the instructions of all its warps.  A token is the
sum of its launches with the gaps between them, or what the host does for it, if that takes longer (docs/cuda.md, "One graph for
each token").  The numbers of clocks are counted in the SASS of i4 g128 for sm_87 with usual latencies of L2 (270 clocks) and of
mma (33); a measurement of any product (`first_run`, steps "products" and "ncu") tests them one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edgeq.format.codec import Codec
from edgeq.system.devices import DeviceSpec
from edgeq.targets.cuda.lowering.attention import PART, level_of, part_of, side_by_side
from edgeq.targets.rows import PAGE

GHZ = 1e9
CLOCKS = {
    "jetson-orin-nano-8gb": 1.02 * GHZ,
    "jetson-orin-nano-8gb-15w": 0.625 * GHZ,
    "jetson-orin-nx-16gb": 0.918 * GHZ,
    "jetson-agx-orin-64gb": 1.3 * GHZ,
    "rtx-4060-laptop": 2.0 * GHZ,
    "rtx-4070-laptop": 2.0 * GHZ,
    "rtx-4090": 2.52 * GHZ,
    "h100": 1.83 * GHZ,
    "h200": 1.83 * GHZ,
}
"""Clocks of GPUs: of boards the largest of their power mode, of others what makers call boost, of laptops about the middle of
it, of servers less than it, as they have under load."""
HOST, BOARD_HOST = 89e-6, 205e-6
"""Seconds of the host for a greedy token: measured on an EPYC core, and taken to be 2.3 times that on the A78AE of a Jetson."""
UNSEEN = 64
"""Tokens of which the host prepares all but one while the GPU works: the last needs a page of the cache."""

FORM, BLOCK, NORM, NORM_CHANNELS = 1200, 820, 300, 2048
"""Clocks of a round of 1,024 input channels: its quantized input, which is 2 (300 + 300), and its product with 16 output
channels, 270 + 2 * 150 + 250; of the norm for so many channels.  Each waits for L2 once, of a round of input twice."""
NORM_ENDS, ENDS, SHARES = 400, 500, 1500
"""Clocks of the two sums over a block of threads that end a norm, of what ends a launch, of adding what shares have left."""
OTHER = 2000
"""Clocks of a launch that is neither attention nor a product."""
FIRST_PAGE, NEXT_PAGE = 2500, 1900
"""Clocks of attention for the first page of a block of threads, and for one whose keys and values were asked for while it had
the page before: it waits for L2 twice, not for memory (570 clocks)."""
ADD_PARTS, ADDED_TOGETHER = 1900, 24
"""Clocks of leaving the sums of parts and adding those of so many: four times L2 (270), a counter (500), arithmetic (300)."""
ATTENTION_HELD = 2
"""Blocks of threads of attention that a multiprocessor holds at least, as the compiler is asked for."""
BYTES_PER_CLOCK = 4 * 1024 / 156
"""Bytes of weights for which a multiprocessor can issue instructions, four in a clock: 156 for 2,048 weights of a warp, with
what sums groups and asks for lines (tests/cuda/supply/test_machine_code.py counts them)."""


@dataclass(frozen=True)
class Assumed:
    """What nobody has measured yet.

    share   of the memory's peak bandwidth that a launch reads at which its bytes bound
    gap     seconds from the end of a launch to the beginning of the next one of a graph
    """

    share: float
    gap: float


WORSE, EXPECTED, BETTER = Assumed(0.7, 5e-6), Assumed(0.8, 2.5e-6), Assumed(0.9, 1e-6)


@dataclass(frozen=True)
class ProductWork:
    """A product of a token.

    ctas     blocks of threads, those of all shares;  places: that a device runs side by side
    blocks   of 16 output channels of a block of threads;  rounds: of input channels of one
    ahead    bytes that are asked for before the norm
    """

    name: str
    rows: int
    columns: int
    ctas: int
    places: int
    blocks: int
    rounds: int
    shares: int
    normed: bool
    ahead: float

    def nbytes(self, codec: Codec) -> float:
        return self.rows * self.columns * (codec.bits + 16 / codec.group_size) / 8

    @property
    def waves(self) -> int:
        return -(-self.ctas // self.places)

    @property
    def prologue(self) -> float:
        """Clocks before the first product."""
        norm = NORM_ENDS + NORM * -(-self.columns // NORM_CHANNELS) if self.normed else 0
        return norm + FORM

    @property
    def chain(self) -> float:
        """Clocks of a block of threads, with nothing else on the device."""
        rounds = (self.rounds - 1) * FORM + self.rounds * self.blocks * BLOCK
        return self.prologue + rounds + ENDS + (SHARES if self.shares > 1 else 0)


@dataclass(frozen=True)
class Bounds:
    """Seconds of a product by what bounds it."""

    memory: float
    chain: float
    issue: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.chain, self.issue)

    @property
    def name(self) -> str:
        return {self.issue: "instructions", self.chain: "latency", self.memory: "bytes"}[self.seconds]


def product_bounds(work: ProductWork, device: DeviceSpec, codec: Codec, assumed: Assumed) -> Bounds:
    """While a block of threads does its norm and quantizes its input, no more bytes come than it has asked for."""
    clock, nbytes = CLOCKS[device.name], work.nbytes(codec)
    idle = max(0.0, work.prologue / clock - work.ahead / device.bandwidth)
    return Bounds(
        memory=nbytes / (assumed.share * device.bandwidth) + idle,
        chain=work.waves * work.chain / clock,
        issue=nbytes / (BYTES_PER_CLOCK * device.multiprocessors * clock),
    )


@dataclass(frozen=True)
class AttentionWork:
    """Attention of a token row over `context` positions on a GPU of so many multiprocessors.

    heads   blocks of threads that the row has, if each takes the whole context
    """

    context: int
    heads: int
    multiprocessors: int

    @property
    def blocks(self) -> Sequence[int]:
        """Pages of the blocks of threads of a head that take parts side by side."""
        pages, places = -(-self.context // PAGE), self.multiprocessors * ATTENTION_HELD
        reach = 1 << (-(-self.context // PART) - 1).bit_length()
        parts, taken = side_by_side(1, reach, self.heads, places)
        each = taken if parts else pages
        return list(Counter(part_of(page, level_of(0)) // each for page in range(pages)).values())

    @property
    def chain(self) -> float:
        """Clocks of the longest block of threads, or of all if their places have less time, and of adding the parts."""
        pages = self.blocks
        each = [FIRST_PAGE + (count - 1) * NEXT_PAGE for count in pages]
        parts = part_of(-(-self.context // PAGE) - 1, level_of(0)) + 1
        adding = ADD_PARTS * -(-parts // ADDED_TOGETHER) if len(pages) > 1 else 0
        return max(max(each), self.heads * sum(each) / (self.multiprocessors * ATTENTION_HELD)) + adding


@dataclass(frozen=True)
class Token:
    """A decoded token, whose layers are alike.

    products   of a layer, and the head at the end
    launches   of the whole token
    kv_bytes   of a position of the cache, of a layer
    heads      blocks of threads of attention that a token row has, if each takes the whole context
    """

    products: Sequence[ProductWork]
    layers: int
    launches: int
    kv_bytes: int
    context: int
    heads: int

    def seconds(self, device: DeviceSpec, codec: Codec, assumed: Assumed) -> tuple[float, float]:
        """Seconds of the GPU, and until the next token: the host prepares it while the GPU works, but for one of UNSEEN."""
        clock = CLOCKS[device.name]
        each = [product_bounds(work, device, codec, assumed).seconds for work in self.products]
        read = self.context * self.kv_bytes / (assumed.share * device.bandwidth)
        attention = max(read, AttentionWork(self.context, self.heads, device.multiprocessors).chain / clock)
        others = self.launches - self.layers * len(self.products) - 1
        gpu = self.layers * (sum(each[:-1]) + attention) + each[-1] + others * OTHER / clock + self.launches * assumed.gap
        host = BOARD_HOST if device.cores else HOST
        return gpu, max(gpu, host) + host / UNSEEN
