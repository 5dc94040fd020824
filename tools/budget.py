"""What `edgeq convert` is asked to keep to: one budget out of five ways to give it, or a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeq import machine
from edgeq.converters.allocation.budget import Budget
from edgeq.converters.allocation.plan_file import read_plan
from edgeq.devices import Device
from edgeq.errors import InputError
from edgeq.tools.terminal import progress

WAYS = ("average_bits", "size", "read", "kl", "speed", "plan")
_NAMES = {"average_bits": "--bits with a decimal point"}


def resolved(options: dict[str, Any], device: Device | None) -> dict[str, Any]:
    """Options of the command line as those of a conversion: with `budget` or `allocation` where the user gave one.

    InputError: two ways at once, or a plan that cannot be read.
    """
    found = {name: options.pop(name, None) for name in WAYS}
    given = [name for name, value in found.items() if value is not None]
    if len(given) > 1:
        first, second = (_NAMES.get(name, f"--{name}") for name in given[:2])
        raise InputError(f"{first} and {second}: a conversion keeps to one of them; give one of them")
    options["method"] = options["method"] or ""
    if not given:
        return options
    (name,), value = given, found[given[0]]
    if name == "plan":
        return options | {"allocation": read_plan(Path(value))}
    return options | {"budget": _budget(name, value, device)}


def _budget(name: str, value: float, device: Device | None) -> Budget:
    if name == "speed":
        return Budget.of_speed(device or this_machine(), value)
    return Budget("bits", value) if name == "average_bits" else Budget(name, value)  # type: ignore[arg-type]


def this_machine() -> Device:
    """This machine as a device, with its measured read bandwidth."""
    from edgeq.targets.cpu.probes import read_bandwidth

    cpu = machine.cpu()
    with progress() as bar:
        bar(0, 0, "measuring how fast memory is read")
        bandwidth = read_bandwidth(cpu.cores)
    return Device("this-machine", cpu.arch, cpu.cores, machine.memory().total, bandwidth, bandwidth)
