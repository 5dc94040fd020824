"""Argument records: one declaration for the lowering and the kernel, which both name what they mean."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from numba import cfunc, njit, types

import edgeq.targets.cpu
from edgeq.targets.cpu.jit import pipeline
from edgeq.targets.cpu.jit.args import (
    PARTS,
    RECORD_SLOTS,
    Args,
    float32,
    following,
    nbytes,
    nested,
    number,
    pointer,
)

FOLDER = Path(edgeq.targets.cpu.__file__).parent


class Part(Args, part=True):
    kind = number(3)
    limit = float32()


class Whole(Args):
    x = pointer()
    factor = float32(0.5)
    part = nested(Part)
    step = nbytes(8)
    later = following(Part)


pipeline.settle()


@njit  # type: ignore[misc]
def of_part(part):  # type: ignore[no-untyped-def]
    return part.kind * part.limit


def read(record):  # type: ignore[no-untyped-def]
    args = Whole(record)
    return args.x + args.factor + args.step + of_part(args.part) + of_part(args.later)


def test_a_kernel_reads_by_name_what_the_lowering_has_written_by_name() -> None:
    # Compiled here: every worker imports this file.
    kernel = cfunc(types.float64(types.intp))(read)
    first = Whole(x=1000, part=Part(limit=0.25))
    records = np.array([first.record(77, parts=5), [0] * RECORD_SLOTS], np.int64)
    assert records[0, 0] == 77 and records[0, PARTS] == 5
    # The first slot of the record after it is that of a function.
    records[1, :2] = Part(kind=2, limit=100).words()
    assert kernel.ctypes(records.ctypes.data) == 1000 + 0.5 + 8 + 3 * 0.25 + 2 * 100
    assert first.replaced(rows=9).words()[0] == 9 and first.words()[0] == 0


def test_missing_and_unknown_names_are_errors() -> None:
    with pytest.raises(TypeError, match=r"missing \['part'\], unknown \['y'\]"):
        Whole(x=1, y=2)
    with pytest.raises(TypeError, match="part is a Part"):
        Whole(x=1, part=3).words()
    with pytest.raises(TypeError, match="only a kernel"):
        Whole(7)


def test_a_record_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="takes 32 slots of a record; there are 31"):
        type("Long", (Args,), {f"x{i}": pointer() for i in range(PARTS - 1)})
    with pytest.raises(TypeError, match="would hide"):
        type("Hiding", (Args,), {"words": pointer()})


def sources() -> list[Path]:
    return sorted(FOLDER.rglob("*.py"))


def test_every_record_fits() -> None:
    for path in sources():
        importlib.import_module(
            ".".join(("edgeq.targets.cpu", *path.relative_to(FOLDER).with_suffix("").parts)).removesuffix(".__init__")
        )
    kinds, seen = [Args], set[type[Args]]()
    while kinds:
        kind = kinds.pop()
        seen.add(kind)
        # A class that was refused while another test defined it may still be waiting for the garbage collector.
        kinds += [each for each in kind.__subclasses__() if each.__module__.startswith("edgeq.")]
    assert len(seen) > 25
    for kind in seen:
        slots = [slot for field in kind.fields.values() for slot in range(field.slot, field.slot + field.size)]
        assert len(set(slots)) == len(slots) and max(slots) < PARTS, kind


def test_no_kernel_and_no_lowering_names_an_argument_by_number() -> None:
    """No index into a record but by a name: neither an address with a slot's bytes nor an item of a table."""
    for path in sources():
        if path.name == "args.py" and path.parent.name == "jit":
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(record|row)\s*\+\s*\d|\bword\(", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1].split("[")[0] in (
                "records",
                "rows",
                "words",
            ):
                assert not any(
                    isinstance(each, ast.Constant) and isinstance(each.value, int) for each in ast.walk(node.slice)
                ), f"{path}: {ast.unparse(node)}"
