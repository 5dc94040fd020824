"""The quantization methods by name, one file each; `edgeq.converters.method` describes what a method is.

A method is imported when it is asked for: most of them need torch, and what is stored as it is does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from edgeq.converters.method import Method
from edgeq.converters.planning.method_options import check_method_options
from edgeq.converters.planning.options import ConvertOptions


class Methods(Mapping[str, type[Method]]):
    """Classes by the names of methods; `places`: name -> "module of this package.class"."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> type[Method]:
        module, _, kind = self._places[name].partition(".")
        found: type[Method] = getattr(import_module(f"{__name__}.{module}"), kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


METHODS = Methods(
    {
        "none": "none.Unquantized",
        "rtn": "rtn.RoundToNearest",
        "awq": "awq.Awq",
        "gptq": "gptq.Gptq",
        "awq+gptq": "gptq.AwqGptq",
        "smoothquant": "smoothquant.SmoothQuant",
        "smoothquant+gptq": "smoothquant.SmoothQuantGptq",
        "ttq": "ttq.Ttq",
        "quarot": "quarot.QuaRot",
        "resq": "resq.ResQ",
        "mquant": "mquant.MQuant",
        "as-stored": "as_stored.AsStored",
    }
)
TOWERS = Methods({"mquant": "mquant.MQuantTower"})
"""Methods that do to a vision tower more than rounding."""


def chosen(options: ConvertOptions) -> type[Method]:
    """The method that the options name.  InputError: as `check_method_options`."""
    check_method_options(options)
    return METHODS[options.method]
