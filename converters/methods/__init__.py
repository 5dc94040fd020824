"""The quantization methods by name, one file each; `edgeq.converters.method` describes what a method is."""

from edgeq.converters.method import Method
from edgeq.converters.methods.awq import Awq
from edgeq.converters.methods.gptq import AwqGptq, Gptq
from edgeq.converters.methods.none import Unquantized
from edgeq.converters.methods.quarot import QuaRot
from edgeq.converters.methods.resq import ResQ
from edgeq.converters.methods.rtn import RoundToNearest
from edgeq.converters.methods.smoothquant import SmoothQuant, SmoothQuantGptq
from edgeq.converters.methods.ttq import Ttq
from edgeq.converters.options import ConvertOptions, spelled
from edgeq.errors import InputError

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (Unquantized, RoundToNearest, Awq, Gptq, AwqGptq, SmoothQuant, SmoothQuantGptq, Ttq, QuaRot, ResQ)
}


def chosen(options: ConvertOptions) -> type[Method]:
    """The method that the options name.

    InputError: there is none of this name, it cannot store so many bits, or it has no use for an option that was given.
    """
    if options.method not in METHODS:
        raise InputError(f"method {options.method!r} is not known; supported: {', '.join(METHODS)}")
    method = METHODS[options.method]
    for name in options.of_method():
        needed = "calibration" if name.startswith("calibration") else name
        if needed not in method.defaults:
            users = [each.name for each in METHODS.values() if needed in each.defaults]
            raise InputError(f"{spelled(name)} goes with --method {', '.join(users)}; --method {method.name} has no use for it")
    if options.bits is not None and options.bits not in method.bits:
        widths = method.bits
        raise InputError(f"{options.bits} bits are not supported by {method.name}; choose {widths[0]} to {widths[-1]}")
    return method
