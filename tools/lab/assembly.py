"""The machine code of a kernel of the cpu target, as text.

    python -m edgeq.tools.lab.assembly                                  names the kernels and their literals
    python -m edgeq.tools.lab.assembly norm 12
    python -m edgeq.tools.lab.assembly integer_matvec avx512-vnni 4 0 0 0

Literals are the numbers that become constants of the machine code; an instruction set may be named.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import click

from edgeq.errors import UnsupportedError
from edgeq.targets.cpu import kernels
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import assembly
from edgeq.tools.cli.entry import Command


def factories() -> dict[str, Callable[..., Any]]:
    """Name -> factory of every kernel."""
    found = {}
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and inspect.signature(function).return_annotation == "Kernel":
                found[name] = function
    return dict(sorted(found.items()))


def literals_of(factory: Callable[..., Any], words: tuple[str, ...]) -> list[int]:
    """Numbers for the words of a command line.  UnsupportedError: too few or too many, or no number."""
    names = list(inspect.signature(factory).parameters)
    if len(words) != len(names):
        raise UnsupportedError(
            f"{factory.__name__} takes {' '.join(names).upper() or 'no literals'}, not {' '.join(words) or 'none'}"
        )
    isas = [isa.name for isa in all_isas()]
    try:
        return [isas.index(word) if word in isas else int(word) for word in words]
    except ValueError:
        raise UnsupportedError(f"literals are numbers or instruction sets ({', '.join(isas)}), not {' '.join(words)}") from None


@click.command(cls=Command)
@click.argument("kernel", required=False)
@click.argument("literals", nargs=-1)
def main(kernel: str | None, literals: tuple[str, ...]) -> None:
    """Print the machine code of KERNEL for this processor; without one, the kernels and their literals."""
    known = factories()
    if kernel is None:
        for name, factory in known.items():
            click.echo(" ".join([name, *(each.upper() for each in inspect.signature(factory).parameters)]))
        return
    if kernel not in known:
        raise UnsupportedError(f"kernel {kernel!r} is not known; there are {', '.join(known)}")
    numbers = literals_of(known[kernel], literals)
    click.echo(assembly(known[kernel], *numbers))


if __name__ == "__main__":
    main()
