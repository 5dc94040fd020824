"""Which options each method has a use for, and what they are when not given.

Apart from the methods, which need torch: a command line is refused before that is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.converters.planning.options import ONE_CODEC, ConvertOptions, spelled
from edgeq.errors import InputError
from edgeq.format.codec import BITS, TABLE_BITS
from edgeq.format.trellis import TRELLIS_BITS

_ROUNDED: dict[str, Any] = {
    "bits": 4,
    "activation_bits": None,
    "kv_bits": None,
    "group_size": 128,
    "symmetric": False,
    "head": None,
    "vision_bits": None,
    "vision_activation_bits": None,
    "calibration": None,
}
_GRIDS: dict[str, Any] = {**_ROUNDED, "half": None, "table": None, "trellis": None, "scale_bits": None, "rotate": None}
_ALLOCATED: dict[str, Any] = {"budget": None, "allocation": None}
_SMOOTHED = {**_ROUNDED, "bits": 8, "activation_bits": 8, "group_size": 0, "symmetric": True, "alpha": 0.5}
_ROTATED: dict[str, Any] = {
    "bits": 4,
    "activation_bits": 4,
    "kv_bits": 4,
    "group_size": 0,
    "gptq": False,
    "head": None,
    "vision_bits": None,
    "vision_activation_bits": None,
    "calibration": None,
}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "none": {"dtype": None, "kv_bits": None},
    "rtn": {**_GRIDS, "activations": None, "allocation": None},
    "awq": _GRIDS,
    "gptq": {**_GRIDS, "act_order": False, "tune": None, **_ALLOCATED},
    "awq+gptq": {**_GRIDS, "act_order": False, "tune": None, **_ALLOCATED},
    "smoothquant": {**_SMOOTHED, "activations": None},
    "smoothquant+gptq": {**_SMOOTHED, "act_order": False},
    "ttq": {**_ROUNDED, "group_size": 32, "rank": 16, "master": "i8"},
    "quarot": {**_ROTATED, "split_row": None, "activations": None},
    "resq": {**_ROTATED, "high_fraction": 0.125},
    "mquant": {
        **{key: value for key, value in _ROTATED.items() if key != "gptq"},
        "activation_bits": 8,
        "kv_bits": None,
        "activations": "modality",
        "act_order": True,
        "rotate": True,
        "split_row": None,
    },
    "as-stored": {"kv_bits": None},
}
"""Method -> every option that it has a use for -> its value when not given; an option that is not there is refused.

Keys are fields of ConvertOptions.  None: `head` and `activation_bits` measured, `calibration` none or the built-in text,
`kv_bits` 16, no `budget`, no `allocation`, no `half`, no `table`, no `trellis`, no `rotate`; `scale_bits` 16.
"""
WIDTHS = {"ttq": range(2, 6)}
"""Bits of weights that a method can store, where it is not all of them."""
CONSTANT = ("static", "modality")
"""Kinds of activations whose scales are measured when a file is made."""
CALIBRATED = ("awq", "gptq", "awq+gptq", "smoothquant", "smoothquant+gptq", "resq", "mquant")
"""Methods that read calibration text whatever the options are."""


def check_method_options(options: ConvertOptions) -> None:
    """InputError: there is no such method, it cannot store so many bits, or it has no use for an option that was given."""
    if options.method not in DEFAULTS:
        raise InputError(f"method {options.method!r} is not known; supported: {', '.join(DEFAULTS)}")
    for name in options.of_method():
        needed = "calibration" if name.startswith("calibration") else name
        if needed not in DEFAULTS[options.method]:
            users = ", ".join(method for method, values in DEFAULTS.items() if needed in values)
            raise InputError(f"{spelled(name)} goes with --method {users}; --method {options.method} has no use for it")
    for name in ("budget", "allocation"):
        given = [key for key in ONE_CODEC if getattr(options, key) is not None]
        if getattr(options, name) is not None and given:
            raise InputError(
                f"{spelled(given[0])} is one codec for all parts, {spelled(name)} chooses one for each: give one of them"
            )
    if options.half and options.symmetric is not None:
        raise InputError("--half has neither zero points nor an integer for zero: give it or --sym/--asym")
    if options.table and (options.symmetric is not None or options.half):
        raise InputError("--table has entries that say where zero is: give it, --half or --sym/--asym")
    if options.table and options.bits is not None and options.bits not in TABLE_BITS:
        raise InputError(f"--table has at most 16 entries: {options.bits} bits are not supported; choose 2, 3 or 4")
    if options.trellis:
        _check_trellis(options)
    if options.scale_bits == 4:
        checks = {"--half": not options.half, "groups": options.group_size == 0}
        if wrong := [needed for needed, lacking in checks.items() if lacking]:
            raise InputError(f"--scale-bits 4 needs {wrong[0]}: its scales are shares of the largest of a row, on a half grid")
    if options.rotate == "auto":
        _check_auto_rotate(options)
    widths = WIDTHS.get(options.method, BITS)
    if options.bits is not None and options.bits not in widths:
        raise InputError(f"{options.bits} bits are not supported by {options.method}; choose {widths[0]} to {widths[-1]}")
    if (
        options.activation_bits == 6
        and DEFAULTS[options.method].get("activations") is None
        and options.activations
        in (
            None,
            "block",
        )
    ):
        raise InputError("6 bits of activations have a scale for every token or constant ones: give --activations")
    reads = options.calibration or options.method in CALIBRATED or options.gptq or options.activations in CONSTANT
    if not reads and (options.calibration_rows or options.calibration_length):
        raise InputError(f"--method {options.method} reads no calibration text unless --calibration names one")


def _check_auto_rotate(options: ConvertOptions) -> None:
    if options.method not in ("gptq", "awq+gptq"):
        raise InputError(f"--auto-rotate goes with --method gptq, awq+gptq; --method {options.method} takes --rotate alone")
    if options.budget is not None or options.allocation is not None:
        given = spelled("budget" if options.budget is not None else "allocation")
        raise InputError(
            f"--auto-rotate tries one codec for all layers, and {given} gives one to each: give --rotate or neither"
        )


def _check_trellis(options: ConvertOptions) -> None:
    if options.symmetric is not None or options.half or options.table:
        raise InputError("--trellis has entries that say where zero is: give it, --table, --half or --sym/--asym")
    if options.bits not in TRELLIS_BITS:
        given = "4 are the default" if options.bits is None else f"{options.bits} were asked for"
        raise InputError(f"--trellis stores 2 or 3 bits, {given}: give --bits 2 or --bits 3")
    if options.scale_bits is not None:
        raise InputError("--trellis has scales of 4 bits whatever else is given: leave --scale-bits out")
    if options.group_size == 0:
        raise InputError("--trellis needs groups: its scales are shares of the largest of a row, of 4 bits each")
