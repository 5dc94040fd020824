"""What `edgeq convert` is asked to keep to: one budget out of five ways to give it, or a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeq.converters.allocation.budget import Budget
from edgeq.converters.allocation.plan_file import read_plan
from edgeq.devices import Device
from edgeq.errors import InputError
from edgeq.tools.terminal import note

if TYPE_CHECKING:
    from edgeq.converters.plan import ConversionPlan

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
        # For this machine the shape of the model has to be known first: `measured_here`.
        return Budget.of_speed(device or Device("this-machine", "", 1, 1, 1.0), value)
    return Budget("bits", value) if name == "average_bits" else Budget(name, value)  # type: ignore[arg-type]


def measured_here(plan: ConversionPlan, speed: float) -> tuple[ConversionPlan, Device]:
    """The plan with the bytes that this machine reads for a token at this speed, from its decode of models of the plan's shape.

    Where the mode follows from measurements at the end of the conversion, a8 is taken, which most models get.
    InputError: no number of bytes is read so fast.  ResourceError: there is no room to measure.
    """
    from edgeq.tools.decode_speed import this_machine_for

    device = this_machine_for(plan.method.stored_config, plan.method.mode or "a8")
    slowest, fastest = (1 / seconds for _, seconds in (device.decode_points[-1], device.decode_points[0]))
    if device.readable(1 / speed) <= 0:
        raise InputError(
            f"--speed {speed:g}: this machine decodes models of this shape at {fastest:,.1f} tokens per second in 2 bits, and "
            "what is not read takes longer than that already; ask for less"
        )
    budget = Budget.of_speed(device, speed)
    note(
        f"this machine decodes models of this shape at {slowest:,.1f} tokens per second in 8 bits to {fastest:,.1f} in 2: "
        f"--speed {speed:g} is {budget} here"
    )
    return replace(plan, options=replace(plan.options, budget=budget)), device
