"""What a GPU is run under: driver, clock, power limit or mode, temperature.

nvidia-smi --query-gpu in CSV; on a Jetson, which has no such table, the files of L4T and nvpmodel (NVIDIA Jetson Linux
Developer Guide, "Power Management" and "Clock Frequency and Power Management").  What neither tells is None.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from edgeq.system.machine import text_of

QUERY = ("--query-gpu=name,power.draw,temperature.gpu,clocks.sm,driver_version,power.limit", "--format=csv,noheader,nounits")
SECONDS = 5.0
"""A tool that takes longer to answer is treated as absent."""
RELEASE = Path("/etc/nv_tegra_release")
DEVFREQ = Path("/sys/class/devfreq")
THERMAL = Path("/sys/class/thermal")
NAMES = ("*.gpu", "*.ga10b", "*.gv11b")
"""Names of the GPU's clock, by versions of L4T."""


class GpuState(NamedTuple):
    """Power, temperature, clock of the multiprocessors, driver and the most power it may draw; None: it does not tell."""

    name: str
    watts: float | None
    celsius: float | None
    mhz: float | None
    driver: str | None
    limit: float | None


def queried() -> str:
    """The output of nvidia-smi.  OSError, SubprocessError: there is none."""
    return output_of("nvidia-smi", *QUERY)


def gpus(text: str) -> list[GpuState]:
    """The GPUs in the output of nvidia-smi, where "[N/A]" and "[Not Supported]" stand for what is not known."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        GpuState(name, _known(watts), _known(celsius), _known(mhz), _version(driver), _known(limit))
        for name, watts, celsius, mhz, driver, limit in (cells for cells in lines if len(cells) == 6)
    ]


def conditions(name: str | None) -> dict[str, float | str | None]:
    """Fields of a record about the only GPU of that name; None where there are several, or it does not tell."""
    found = dict.fromkeys(("device_mhz", "device_celsius", "device_driver", "device_power_limit", "device_power_mode"))
    if name is None:
        return found
    own = [gpu for gpu in _states() if gpu.name == name]
    if RELEASE.exists():
        told = _board()
    elif len(own) == 1:
        told = {
            "device_mhz": own[0].mhz, "device_celsius": own[0].celsius, "device_driver": own[0].driver,
            "device_power_limit": own[0].limit,
        }  # fmt: skip
    else:
        told = {}
    return {**found, **told}


def only() -> dict[str, float | str | None]:
    """The name of the GPU of this machine, and its conditions; nothing known of several."""
    names = [gpu.name for gpu in _states()]
    name = "GPU of a Jetson" if RELEASE.exists() else names[0] if len(names) == 1 else None
    return {"device": name or "GPU of unknown name", **conditions(name)}


def lacking(facts: Mapping[str, object]) -> list[str]:
    """What a record of a run on a GPU has to have, and `facts` have not."""
    needed = {"device_driver": "GPU driver", "device_mhz": "GPU clock", "device_celsius": "GPU temperature"}
    missing = [words for key, words in needed.items() if not facts.get(key)]
    if not facts.get("device_power_limit") and not facts.get("device_power_mode"):
        missing.append("GPU power limit or mode")
    return missing if facts.get("device") else []


def _states() -> list[GpuState]:
    try:
        return gpus(queried()) if shutil.which("nvidia-smi") else []
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _board() -> dict[str, float | str | None]:
    """State of a Jetson's only GPU, the one of its chip."""
    release = re.search(r"R(\d{1,3}) \(release\), REVISION: (\d{1,3}(?:\.\d{1,3})?)", text_of(RELEASE))
    clocks = [text_of(path / "cur_freq") for pattern in NAMES for path in sorted(DEVFREQ.glob(pattern))]
    zones = [zone for zone in sorted(THERMAL.glob("thermal_zone*")) if text_of(zone / "type").lower().startswith("gpu")]
    heat = _known(text_of(zones[0] / "temp")) if zones else None
    mode = None
    if shutil.which("nvpmodel"):
        try:
            named = re.search(r"NV Power Mode: (\w{1,40})", output_of("nvpmodel", "-q"))
            mode = named[1] if named else None
        except (OSError, ValueError, subprocess.SubprocessError):
            mode = None
    hertz = next((known for known in map(_known, clocks) if known), None)
    return {
        "device_mhz": hertz / 1e6 if hertz else None,
        "device_celsius": heat / 1000 if heat else None,
        "device_driver": f"L4T {release[1]}.{release[2]}" if release else None,
        "device_power_mode": mode,
    }


def _known(cell: str) -> float | None:
    return float(cell) if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", cell) else None


def _version(cell: str) -> str | None:
    return cell if re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", cell) else None


def output_of(*command: str) -> str:
    """What a tool writes.  OSError, subprocess.SubprocessError: it is not there, fails, or takes longer than SECONDS."""
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
