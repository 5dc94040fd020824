"""What `edgeq convert` is asked to keep to: one budget out of five ways to give it, or a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeq.converters.budget.budget import Budget
from edgeq.converters.budget.plan_file import read_plan
from edgeq.converters.probing.decode_times import WIDTHS
from edgeq.errors import InputError
from edgeq.format.partial import partial_path
from edgeq.system.devices import DeviceSpec
from edgeq.tools.cli.terminal import note

if TYPE_CHECKING:
    from edgeq.converters.planning.plan import ConversionPlan
    from edgeq.tools.measure.decode_speed import AllocationsHere

WAYS = ("average_bits", "size", "read", "kl", "speed", "plan")
_NAMES = {"average_bits": "--bits with a decimal point"}


def resolved(options: dict[str, Any], device: DeviceSpec | None) -> dict[str, Any]:
    """Options of the command line as those of a conversion: with `budget` or `allocation` where the user gave one.

    InputError: two ways at once, or a plan that cannot be read.
    """
    found = {name: options.pop(name, None) for name in WAYS}
    given = [name for name, value in found.items() if value is not None]
    if len(given) > 1:
        first, second = (_NAMES.get(name, f"--{name}") for name in given[:2])
        raise InputError(f"{first} and {second}: a conversion keeps to one of them; give one of them")
    options["method"] = options["method"] or ""
    if options.pop("auto_rotate", None):
        if options.get("rotate") is not None:
            raise InputError("--auto-rotate chooses what --rotate and --no-rotate say: give one of them")
        options["rotate"] = "auto"
    if not given:
        return options
    (name,), value = given, found[given[0]]
    if name == "plan":
        return options | {"allocation": read_plan(Path(value))}
    return options | {"budget": _budget(name, value, device)}


def _budget(name: str, value: float, device: DeviceSpec | None) -> Budget:
    if name == "speed":
        return Budget.of_speed(device, value)
    unit = "bits" if name == "average_bits" else name
    return Budget(unit, value)  # type: ignore[arg-type]


def decode_here(plan: ConversionPlan, output: Path | None) -> AllocationsHere:
    """Decode of allocations of the plan's model on this machine; measures that of models in one codec.

    Where the mode follows from measurements at the end of the conversion, a8 is taken, which most models get.
    ResourceError: there is no room to measure.
    """
    from edgeq.tools.measure.decode_speed import AllocationsHere

    # A file that is there already is what would be made, or is refused, unless it is to be replaced.
    begun = output is not None and (
        (output.exists() and not plan.options.force) or (partial_path(output).exists() and not plan.options.restart)
    )
    here = AllocationsHere(plan.method.stored_config, plan.method.mode or "a8", begun)
    shown = ", ".join(f"{codec.bits}: {1 / here.times.whole[codec][1]:,.1f}" for codec in WIDTHS)
    note(f"tokens per second of models of this shape on this machine, by bits: {shown}")
    return here
