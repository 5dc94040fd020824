"""Devices by name, as data: what `convert --for` and `fit` check a file against.

Peak memory bandwidths are those that the makers state; `read_bandwidth` is a published measurement, where there is one.  Decode
reads every weight once per token, so bandwidth over bytes per token bounds its speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.errors import InputError

GB = 10**9
GIB = 1 << 30
READ_SHARE = 0.95
"""Share of the measured read bandwidth that decode reaches."""
READ_SHARES = (0.75, 0.96)
"""The least and the most of it: decode of a 1B model read at 0.76 on a Zen 4 server core and at 0.96 on a Zen 5."""
PEAK_SHARE = 0.75
"""Share of a memory's peak bandwidth that decode reaches, where nothing is measured; published rows reach 0.7 to 0.9."""
PEAK_SHARES = (0.7, 0.9)
MEASURED_SHARES = (0.9, 1.1)
"""The slowest and the fastest decode that is expected of what was measured, over the measured one."""
PROCESS = 300 * 10**6
"""Bytes that a run takes beside the file and the cache: Python, Numba, the tokenizer, buffers."""


@dataclass(frozen=True)
class DeviceSpec:
    """One device.

    isa              instruction set or CUDA architecture
    cores            of the processor; 0: a graphics card, which any machine can have
    multiprocessors  of the GPU, where there is one
    memory           bytes
    bandwidth        peak of the memory, bytes per second
    read_bandwidth   measured, bytes per second; 0: not published
    decoded          bytes of weights that a token of a file read and the seconds it took; None: decode is expected to read a
                     share of the bandwidth
    """

    name: str
    isa: str
    cores: int
    memory: int
    bandwidth: float
    read_bandwidth: float = 0.0
    decoded: tuple[int, float] | None = None
    multiprocessors: int = 0

    @property
    def usable_bandwidth(self) -> float:
        return self.read_bandwidth or self.bandwidth

    @property
    def decode_bandwidth(self) -> float:
        """Bytes of weights per second that decode is expected to read."""
        return READ_SHARE * self.read_bandwidth or PEAK_SHARE * self.bandwidth

    @property
    def gpu(self) -> bool:
        """Whether a file runs on its graphics processor."""
        return self.isa.startswith("sm_")

    @property
    def supported(self) -> bool:
        """Whether this version has a runtime that was measured on such a device: that for GPUs has not run on one yet."""
        return not self.gpu

    @property
    def usable_memory(self) -> int:
        """Memory less what the system takes: an eighth, at least half a GiB."""
        return self.memory - max(self.memory // 8, GIB // 2)

    def decode_seconds(self, weights: float, cache: float = 0.0) -> float:
        """The seconds that a token is expected to take which reads so many bytes of weights and of its cache."""
        if self.decoded is None:
            return (weights + cache) / self.decode_bandwidth
        read, seconds = self.decoded
        return seconds * weights / read + cache / self.decode_bandwidth

    def decode_range(self, weights: float, cache: float) -> tuple[float, float]:
        """The fewest and the most tokens per second that are expected."""
        if self.decoded is not None:
            expected, shares = 1 / self.decode_seconds(weights, cache), MEASURED_SHARES
        else:
            bandwidth, shares = (self.read_bandwidth, READ_SHARES) if self.read_bandwidth else (self.bandwidth, PEAK_SHARES)
            expected = bandwidth / (weights + cache)
        return shares[0] * expected, shares[1] * expected

    def longest_context(self, file_bytes: int, position_bytes: int) -> int:
        """Positions of cache that fit in memory beside a file; 0: the file alone does not."""
        return max(0, self.usable_memory - needed(file_bytes, 0)) // position_bytes

    def ceiling(self, bytes_per_token: int) -> float:
        """Upper bound of decode in tokens per second, from bandwidth."""
        return self.usable_bandwidth / bytes_per_token


DEVICES = {
    device.name: device
    for device in (
        # LPDDR4-3200 on 32 bits; STREAM 4.8 to 5.6 GB/s.  Armv8.0: no dot product.
        DeviceSpec("raspberry-pi-4", "neon", 4, 8 * GIB, 12.8 * GB, 5.2 * GB),
        # 8 GB.  LPDDR4X-4267 on 32 bits; 13.8 GB/s measured, llama.cpp discussion 30069.
        DeviceSpec("raspberry-pi-5", "neon-dotprod", 4, 8 * GIB, 17.1 * GB, 13.8 * GB),
        # The same processor and memory type, so the same bandwidth: one core reads 9.4 GB/s on a 4 GB board, 9.1 on one of
        # 8 GB (raspberrypi/firmware issue 1876).  Four cores of these two were not measured.
        DeviceSpec("raspberry-pi-5-4gb", "neon-dotprod", 4, 4 * GIB, 17.1 * GB, 13.8 * GB),
        DeviceSpec("raspberry-pi-5-16gb", "neon-dotprod", 4, 16 * GIB, 17.1 * GB, 13.8 * GB),
        # 25 W mode; 68.3 GB/s in the 15 W mode, which is all that the first boards have.
        DeviceSpec("jetson-orin-nano-8gb", "sm_87", 6, 8 * GIB, 102.4 * GB, multiprocessors=8),
        DeviceSpec("jetson-orin-nano-8gb-15w", "sm_87", 6, 8 * GIB, 68.3 * GB, multiprocessors=8),
        DeviceSpec("jetson-orin-nx-16gb", "sm_87", 8, 16 * GIB, 102.4 * GB, multiprocessors=8),
        DeviceSpec("jetson-agx-orin-64gb", "sm_87", 12, 64 * GIB, 204.8 * GB, multiprocessors=16),
        # LPDDR5X on 256 bits; compute capability 11.0, which runs from PTX.
        DeviceSpec("jetson-agx-thor", "sm_110", 14, 128 * GIB, 273.1 * GB, multiprocessors=20),
        # LPDDR5X-8448 on 128 bits.
        DeviceSpec("snapdragon-x-elite", "neon-i8mm", 12, 16 * GIB, 135.2 * GB),
        # Two channels of DDR4-3200.
        DeviceSpec("x86-avx2", "avx2", 8, 16 * GIB, 51.2 * GB),
        # Two channels of LPDDR5-5200: a laptop with Alder Lake or Raptor Lake, 4 fast cores and 8 small ones.
        DeviceSpec("x86-avx-vnni", "avx-vnni", 12, 16 * GIB, 83.2 * GB),
        # Two channels of DDR5-5600.
        DeviceSpec("x86-avx512-vnni", "avx512-vnni", 8, 32 * GIB, 89.6 * GB),
        DeviceSpec("rtx-3060", "sm_86", 0, 12 * GIB, 360 * GB, multiprocessors=28),
        DeviceSpec("rtx-3090", "sm_86", 0, 24 * GIB, 936 * GB, multiprocessors=82),
        DeviceSpec("rtx-4060-laptop", "sm_89", 0, 8 * GIB, 256 * GB, multiprocessors=24),
        DeviceSpec("rtx-4070-laptop", "sm_89", 0, 8 * GIB, 256 * GB, multiprocessors=36),
        DeviceSpec("rtx-4070-ti", "sm_89", 0, 12 * GIB, 504 * GB, multiprocessors=60),
        DeviceSpec("rtx-4090", "sm_89", 0, 24 * GIB, 1008 * GB, multiprocessors=128),
        # Compute capability 12.0, which runs from PTX.
        DeviceSpec("rtx-5090", "sm_120", 0, 32 * GIB, 1792 * GB, multiprocessors=170),
        # SXM, as h100 and h200 are.
        DeviceSpec("a100-80gb", "sm_80", 0, 80 * GIB, 2039 * GB, multiprocessors=108),
        DeviceSpec("h100", "sm_90", 0, 80 * GIB, 3350 * GB, multiprocessors=132),
        DeviceSpec("h200", "sm_90", 0, 141 * GB, 4800 * GB, multiprocessors=132),
    )
}


def needed(file_bytes: int, cache_bytes: int) -> int:
    """Bytes of memory that a run of a file takes with a cache of so many bytes."""
    return file_bytes + cache_bytes + PROCESS


def device(name: str) -> DeviceSpec:
    """The device `name`.  InputError: there is none; the message lists all."""
    if name not in DEVICES:
        raise InputError(f"device {name!r} is not known; choose one of {', '.join(DEVICES)}")
    return DEVICES[name]
