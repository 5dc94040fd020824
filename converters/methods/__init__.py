"""The quantization methods by name, one file each; `edgeq.converters.method` describes what a method is."""

from edgeq.converters.method import Method
from edgeq.converters.methods.as_stored import AsStored
from edgeq.converters.methods.awq import Awq
from edgeq.converters.methods.gptq import AwqGptq, Gptq
from edgeq.converters.methods.mquant import MQuant, MQuantTower
from edgeq.converters.methods.none import Unquantized
from edgeq.converters.methods.quarot import QuaRot
from edgeq.converters.methods.resq import ResQ
from edgeq.converters.methods.rtn import RoundToNearest
from edgeq.converters.methods.smoothquant import SmoothQuant, SmoothQuantGptq
from edgeq.converters.methods.ttq import Ttq
from edgeq.converters.planning.method_options import check_method_options
from edgeq.converters.planning.options import ConvertOptions

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        *(Unquantized, RoundToNearest, Awq, Gptq, AwqGptq, SmoothQuant, SmoothQuantGptq, Ttq, QuaRot, ResQ, MQuant),
        AsStored,
    )
}

TOWERS: dict[str, type[Method]] = {MQuantTower.name: MQuantTower}
"""Methods that do to a vision tower more than rounding, by their name."""


def chosen(options: ConvertOptions) -> type[Method]:
    """The method that the options name.  InputError: as `check_method_options`."""
    check_method_options(options)
    return METHODS[options.method]
