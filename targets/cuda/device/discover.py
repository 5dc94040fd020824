"""Which NVIDIA GPUs this machine has, and why one cannot be used.  Cheap where there is none: nothing is imported for that."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeq.errors import DeviceError
from edgeq.system.machine import text_of
from edgeq.targets.hardware import Gpu
from edgeq.targets.target import Absence

if TYPE_CHECKING:
    from edgeq.targets.cuda.device.driver import DriverDevice

LIBRARY = "libcuda.so.1"
ELSEWHERE = (
    "/usr/lib/aarch64-linux-gnu/nvidia", "/usr/lib/aarch64-linux-gnu/tegra", "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64",
    "/usr/lib64-nvidia", "/run/opengl-driver/lib",
)  # fmt: skip
"""Where L4T (JetPack 6 and 5), WSL, Kubernetes of Google, Colab and NixOS put the driver's library; not every system tells its
loader."""
SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/sys/module/nvgpu")
"""What a kernel with NVIDIA's driver has; the last three are those of Jetson boards."""
PCI = Path("/sys/bus/pci/devices")
WSL = Path("/dev/dxg")
"""Any maker's GPU in WSL, which shows none on the PCI bus."""
MIN_SM, MIN_DRIVER = 80, 12000
"""Kernels are compiled by CUDA 12.6: any driver of CUDA 12 takes them, from 525.60 on."""
NOT_INSTALLED = "cuda-bindings is not installed; run: pip install edgeq[cuda12], or edgeq[cuda13] with a driver of CUDA 13"


@dataclass(frozen=True)
class Gpus:
    """What was found.

    driver    CUDA version of the driver, 12060 for 12.6; 0: not known
    refused   why none of them can be used; an Absence where there is none
    """

    gpus: tuple[Gpu, ...]
    driver: int
    refused: str | None

    @property
    def first(self) -> Gpu | None:
        """The first that can be used."""
        return next((gpu for gpu in self.gpus if gpu.refused is None), None)


def find() -> Gpus:
    """The GPUs that the driver shows, which CUDA_VISIBLE_DEVICES may limit and order."""
    reason = library_refusal()
    if reason is not None:
        return Gpus((), 0, reason)
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        # A driver's library without a GPU is common: login nodes of clusters, images of containers.
        return Gpus((), 0, NOT_INSTALLED if has_gpu() or WSL.exists() else Absence(NOT_INSTALLED))
    try:
        return _ask()
    except (DeviceError, ImportError, RuntimeError) as error:
        # RuntimeError: the bindings found no library, or one without a function.
        return Gpus((), 0, f"the driver of the GPU does not answer: {error}")


def library_refusal() -> str | None:
    """Why the driver's library cannot be loaded; None: it is loaded."""
    for place in (LIBRARY, *(f"{folder}/{LIBRARY}" for folder in ELSEWHERE)):
        try:
            # The bindings, which ask for it by its name, then find it loaded.
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
            return None
        except OSError:
            continue
    if not has_gpu():
        return Absence("this machine has no NVIDIA GPU")
    places = ", ".join(ELSEWHERE)
    return (
        f"{LIBRARY} is not there, neither where the loader looks nor in {places}; install NVIDIA's driver, on a Jetson "
        "nvidia-l4t-cuda, and in a container run it with the NVIDIA runtime"
    )


def has_gpu() -> bool:
    """Whether the kernel or the PCI bus shows an NVIDIA GPU."""
    if any(Path(sign).exists() for sign in SIGNS):
        return True
    return any(text_of(each / "vendor") == "0x10de" and text_of(each / "class").startswith("0x03") for each in PCI.glob("*"))


def _ask() -> Gpus:
    from edgeq.targets.cuda.device.calls import bindings, called, version_text
    from edgeq.targets.cuda.device.driver import DriverDevice

    cuda = bindings()
    try:
        called(cuda, "cuInit", 0)
        count, driver = called(cuda, "cuDeviceGetCount"), int(called(cuda, "cuDriverGetVersion"))
    except DeviceError as error:
        if getattr(error, "name", "") == "CUDA_ERROR_NO_DEVICE":
            hidden = "the driver shows no GPU; CUDA_VISIBLE_DEVICES may hide it"
            return Gpus((), 0, hidden if has_gpu() else Absence("this machine has no NVIDIA GPU"))
        raise
    if driver < MIN_DRIVER:
        needed = f"{version_text(MIN_DRIVER)} or later is needed (driver 525.60)"
        return Gpus((), driver, f"the driver is of CUDA {version_text(driver)}; {needed}: install a newer one")
    own = int(getattr(cuda, "CUDA_VERSION", MIN_DRIVER))
    if own // 1000 > driver // 1000:
        needed = f"cuda-bindings of CUDA {own // 1000} need a driver of it, this one is of CUDA {version_text(driver)}"
        return Gpus((), driver, f"{needed}; run: pip install edgeq[cuda{driver // 1000}]")
    gpus = tuple(_gpu(DriverDevice(ordinal), ordinal) for ordinal in range(count))
    usable = any(gpu.refused is None for gpu in gpus)
    return Gpus(gpus, driver, None if usable else "; ".join(f"{gpu.name}: {gpu.refused}" for gpu in gpus))


def _gpu(device: DriverDevice, ordinal: int) -> Gpu:
    refused = None
    if device.sm < MIN_SM:
        refused = f"it is sm_{device.sm}; sm_{MIN_SM} (Ampere) or later is needed"
    return Gpu(ordinal, device.name, device.sm, device.multiprocessors, device.total, device.integrated, refused)
