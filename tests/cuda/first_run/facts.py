"""What this machine and its GPU are, and what they cost before any model runs."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from time import perf_counter

from edgeq.errors import EdgeqError
from edgeq.targets.cuda.arguments.rows import ReadMemoryArguments
from edgeq.targets.cuda.device import bandwidth, discover
from edgeq.targets.cuda.device.device import Call, Copy
from edgeq.targets.cuda.device.driver import DriverDevice
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.nvrtc import arch_for
from edgeq.tools.measure import gpu
from tests.cuda.first_run.results import write

PACKAGES = ("numpy", "numba", "cuda-bindings", "torch", "transformers", "apache-tvm", "nvidia-cuda-nvrtc-cu12", "pytest-xdist")
TOOLS = (
    ("nvidia-smi", "-q"),
    ("nvpmodel", "-q"),
    ("jetson_clocks", "--show"),
    ("compute-sanitizer", "--version"),
    ("ncu", "--version"),
)
STARTS = 1000


def main() -> None:
    write("facts", {"python": sys.version, "machine": " ".join(platform.uname()), "packages": dict(versions())})
    for command in TOOLS:
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            write("facts", {" ".join(command): done.stdout})
    gpus = discover.find()
    write("facts", {"driver": gpus.driver, "refused": gpus.refused, "gpus": [asdict(each) for each in gpus.gpus]})
    if gpus.first is None:
        sys.exit(gpus.refused or "no GPU")
    device = DriverDevice(gpus.first.ordinal)
    began = perf_counter()
    total, free = device.memory()
    write("facts", {"context_s": perf_counter() - began, "memory": total, "free": free, **gpu.conditions(gpus.first.name)})
    write("facts", starts(device))
    kept = build.kept_image(bandwidth.KERNEL, arch_for(device.sm))
    if kept is None:
        raise EdgeqError("the kernel that reads memory was not carried; run: make gpu-bundle")
    image = kept.images[arch_for(device.sm)].image
    kernel = device.load([replace(kept.generated, image=image)])[bandwidth.KERNEL]
    reads = bandwidth.measured(device, kernel, refresh=True)
    write("facts", {"read_bytes_per_s": reads, "copied_bytes_per_s": bandwidth.copied(device.name)})
    block, out = device.allocate(bandwidth.ROUND), device.allocate(128 * 4)
    device.zero(block.address, bandwidth.ROUND)
    arguments = ReadMemoryArguments(x=block.address, out=out.address, ctas=1, rounds=1)
    call = Call(kernel, *kernel.generated.bind(arguments.by_name))
    device.launch(*call)
    device.synchronize()
    began = perf_counter()
    for _ in range(STARTS):
        device.launch(*call)
    queued = perf_counter() - began
    device.synchronize()
    write("facts", {"launch_us": 1e6 * queued / STARTS, "launch_and_run_us": 1e6 * (perf_counter() - began) / STARTS})


def versions() -> list[tuple[str, str | None]]:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return [(name, version(name)) for name in PACKAGES]


def starts(device: DriverDevice) -> dict[str, float]:
    """Microseconds from the start of a graph that copies 64 bytes until the host goes on, which every token pays."""
    pinned, memory = device.pinned(64), device.allocate(64)
    recording, taken = device.record([Copy("in", memory.address, pinned.address, 64)]), list[float]()
    for _ in range(STARTS):
        began = perf_counter()
        recording.start()
        recording.wait()
        taken.append(1e6 * (perf_counter() - began))
    return {"replay_us": statistics.median(taken), "replay_us_least": min(taken), "replay_us_most": max(taken)}


if __name__ == "__main__":
    main()
