"""Sensors of power and heat: what each says, that it is absent, or which permission is missing.

RAPL      /sys/class/powercap (linux/Documentation/power/powercap/powercap.rst): energy counters in microjoules
INA3221   /sys/class/hwmon (linux/Documentation/hwmon/ina3221.rst): millivolts and milliamperes, on Jetson boards
PMIC      vcgencmd pmic_read_adc and get_throttled, on a Raspberry Pi (raspberrypi/documentation, os/using-vcgencmd)
NVML      nvidia-smi --query-gpu in CSV (gpu.py)
battery   /sys/class/power_supply (linux/Documentation/ABI/testing/sysfs-class-power): microwatts, or microvolts and -amperes
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeq.system.machine import text_of
from edgeq.tools.measure.gpu import gpus, output_of, queried

POWERCAP = Path("/sys/class/powercap")
HWMON = Path("/sys/class/hwmon")
SUPPLIES = Path("/sys/class/power_supply")

Read = Callable[[], float]


@dataclass(frozen=True)
class Sensor:
    """A source of energy.

    state     "read", "absent", or why it cannot be read and what to do
    joules    a counter of energy, where the sensor is one;  wraps_at: it starts again from 0 after so many
    watts     power now, where the sensor tells that
    """

    name: str
    state: str
    joules: Read | None = None
    wraps_at: float = 0.0
    watts: Read | None = None

    @property
    def usable(self) -> bool:
        return self.joules is not None or self.watts is not None


def every() -> list[Sensor]:
    """All kinds, whether this machine has them or not, the best source of energy first."""
    return [rapl(), ina3221(), pmic(), battery(), nvml()]


def rapl(root: Path = POWERCAP) -> Sensor:
    """The energy of all processor packages; not of the rest of the machine."""
    packages = sorted(path for path in root.glob("intel-rapl:*") if path.name.count(":") == 1)
    if not packages:
        return Sensor("RAPL", "absent")

    def joules() -> float:
        return sum(_number(path / "energy_uj") for path in packages) / 1e6

    try:
        joules()
        wraps_at = sum(_number(path / "max_energy_range_uj") for path in packages) / 1e6
    except PermissionError:
        # Closed to others since CVE-2020-8694: it tells what other processes compute.
        files = f"{root}/intel-rapl:*/energy_uj"
        return Sensor("RAPL", f"unreadable: no permission to read {files}; as root: chmod a+r {files}")
    except (OSError, ValueError):
        return Sensor("RAPL", "unreadable: its counters hold no number")
    return Sensor("RAPL", "read", joules, wraps_at)


TOTAL = "VDD_IN"
"""Rail of a Jetson Orin through which all others are fed (NVIDIA Jetson Linux Developer Guide, power monitoring)."""


def ina3221(root: Path = HWMON) -> Sensor:
    """The power of the board: its input rail, or the sum of all rails where none is known to feed the others."""
    rails: dict[str, tuple[Path, Path]] = {}
    for chip in sorted(root.glob("hwmon*")):
        if text_of(chip / "name") != "ina3221":
            continue
        for label in sorted(chip.glob("in[1-3]_label")):
            channel = label.name[2]
            files = chip / f"in{channel}_input", chip / f"curr{channel}_input"
            if all(file.exists() for file in files):
                rails[text_of(label)] = files
    if not rails:
        return Sensor("INA3221", "absent")
    chosen = [rails[TOTAL]] if TOTAL in rails else list(rails.values())

    def watts() -> float:
        return sum(_number(volts) * _number(amperes) for volts, amperes in chosen) / 1e6

    return _tried("INA3221", watts, f"{root}/hwmon*/in*_input")


_ADC = re.compile(r"^\s*(\w+)_([AV]) (?:current|volt)\(\d+\)=([\d.]+)[AV]\s*$", re.MULTILINE)


def pmic_watts(text: str) -> float:
    """Watts of all rails in the output of `vcgencmd pmic_read_adc`.  ValueError: no rail has both current and voltage."""
    found: dict[str, dict[str, float]] = {}
    for rail, unit, value in _ADC.findall(text):
        found.setdefault(rail, {})[unit] = float(value)
    pairs = [rail for rail in found.values() if len(rail) == 2]
    if not pairs:
        raise ValueError("no rail with current and voltage")
    return sum(rail["A"] * rail["V"] for rail in pairs)


THROTTLED = {
    0: "under-voltage",
    1: "clock capped",
    2: "throttled",
    3: "soft temperature limit",
    16: "under-voltage has occurred",
    17: "clock was capped",
    18: "throttling has occurred",
    19: "soft temperature limit has occurred",
}


def throttled(text: str) -> list[str]:
    """What `vcgencmd get_throttled` says ("throttled=0x50000").  ValueError: it is something else."""
    found = re.fullmatch(r"throttled=0x([0-9a-fA-F]{1,8})", text.strip())
    if not found:
        raise ValueError(f"expected throttled=0x..., found {text[:40]!r}")
    bits = int(found[1], 16)
    return [name for bit, name in THROTTLED.items() if bits >> bit & 1]


def pmic() -> Sensor:
    """The power of a Raspberry Pi 5's board, without what is fed past its regulators, such as USB."""
    if shutil.which("vcgencmd") is None:
        return Sensor("PMIC", "absent")
    return _tried("PMIC", lambda: pmic_watts(output_of("vcgencmd", "pmic_read_adc")), "/dev/vcio")


NVML = "NVML"


def nvml_watts(text: str) -> float:
    """Watts of all GPUs in what nvidia-smi was asked for (gpu.py).  ValueError: none tells its power."""
    known = [gpu.watts for gpu in gpus(text) if gpu.watts is not None]
    if not known:
        raise ValueError("no GPU tells its power")
    return sum(known)


def nvml() -> Sensor:
    """The power of NVIDIA GPUs: taken where the target runs on one."""
    if shutil.which("nvidia-smi") is None:
        return Sensor(NVML, "absent")
    return _tried(NVML, lambda: nvml_watts(queried()), "/dev/nvidiactl")


def battery(root: Path = SUPPLIES) -> Sensor:
    """The power that batteries give: all that the machine takes while no charger is plugged in."""
    batteries = [path for path in sorted(root.glob("*")) if text_of(path / "type") == "Battery"]
    if not batteries:
        return Sensor("battery", "absent")
    if not any(text_of(path / "status") == "Discharging" for path in batteries):
        return Sensor("battery", "not discharging: unplug the charger to measure with it")

    def watts() -> float:
        return sum(map(_drawn, batteries))

    return _tried("battery", watts, f"{root}/*/power_now")


def _drawn(path: Path) -> float:
    if text_of(path / "status") != "Discharging":
        return 0.0
    if (path / "power_now").exists():
        return abs(_number(path / "power_now")) / 1e6
    return abs(_number(path / "current_now") * _number(path / "voltage_now")) / 1e12


def _tried(name: str, watts: Read, files: str) -> Sensor:
    """The sensor, if it can be read now."""
    try:
        watts()
    except PermissionError:
        return Sensor(name, f"unreadable: no permission to read {files}")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Sensor(name, f"unreadable: {' '.join(str(error).split())[:200]}")
    return Sensor(name, "read", watts=watts)


def _number(path: Path) -> float:
    return float(path.read_text(encoding="ascii").strip())
