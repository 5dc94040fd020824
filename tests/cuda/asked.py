"""Which kernels the tests ask a device for, recorded on the emulated one: `make kernels` compiles these for a GPU.

Of each file of tests there is a list in asked/.  The emulated device refuses what is not in it, as a GPU would that has only
the pack.  `pytest tests/cuda/ROOM/test_x.py --record-kernels` makes the list of a file again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from edgeq.targets.cuda.supply.pack import Variant

FOLDER = Path(__file__).parent / "asked"


@cache
def listed(tests: str) -> frozenset[Variant]:
    """The kernels that a file of tests asks for, by its name without .py; of one that has no list none."""
    path = FOLDER / f"{tests}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return frozenset(Variant(kernel, tuple(literals)) for kernel, *literals in map(json.loads, lines))


def every() -> list[Variant]:
    """Those of all files, by their symbols."""
    found = frozenset[Variant]().union(*(listed(path.stem) for path in FOLDER.glob("*.jsonl")))
    return sorted(found, key=lambda variant: variant.symbol)


class Asked:
    """What the tests of a run ask for.

    tests    the file whose tests run now; None: its kernels are not for a GPU
    partly   files of which only some tests run: these add to the list
    """

    def __init__(self, recording: bool) -> None:
        self.recording = recording
        self.tests: Path | None = None
        self.partly: set[str] = set()
        self._found: dict[str, set[Variant]] = {}

    def ask(self, variants: Iterable[Variant]) -> None:
        """AssertionError: the file that asks has other kernels in its list."""
        if self.tests is None:
            return
        if self.recording:
            self._found.setdefault(self.tests.stem, set()).update(variants)
        elif missing := sorted(variant.symbol for variant in set(variants) - listed(self.tests.stem)):
            raise AssertionError(
                f"`make kernels` has no {', '.join(missing)}: run all tests of the file, with "
                f"pytest tests/cuda/{self.tests.parent.name}/{self.tests.name} --record-kernels"
            )

    def write(self) -> None:
        """The lists of the files whose tests have run."""
        FOLDER.mkdir(exist_ok=True)
        for tests, variants in self._found.items():
            whole = variants | listed(tests) if tests in self.partly else variants
            lines = sorted(json.dumps([variant.kernel, *variant.literals]) for variant in whole)
            (FOLDER / f"{tests}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
