"""Which target runs: the first that this machine, and the file, allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq import targets
from edgeq.errors import UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.runtime import Model
from edgeq.targets import pick
from edgeq.targets.reference import ReferenceTarget


class Built(ReferenceTarget):
    """A target that runs only the files that something was built for."""

    name = "built"

    def __init__(self, device: bool = True) -> None:
        self.device = device

    def refusal(self, file: ModelFile | None = None) -> str | None:
        if not self.device:
            return "no such device"
        return f"nothing was built for {file.path.name}" if file else None


def known(monkeypatch: pytest.MonkeyPatch, *found: ReferenceTarget) -> None:
    """Let these be all targets, in order of preference."""
    by_name = {target.name: target for target in found}
    monkeypatch.setattr(targets, "TARGETS", tuple(by_name))
    monkeypatch.setattr(targets, "load", by_name.__getitem__)


def test_the_first_that_does_not_refuse_the_file_is_chosen(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, Built(), ReferenceTarget())
    file = ModelFile.open(tiny_path)
    assert pick().target.name == "built" and not pick().refused
    choice, reason = pick(None, file), f"nothing was built for {tiny_path.name}"
    assert choice.target.name == "reference" and choice.refused == [("built", reason)]
    with pytest.raises(UnsupportedError, match=f"no target can run here: built: {reason}"):
        pick("built", file)
    with Model.load(tiny_path) as model:
        assert model.target == "reference" and f"not on built: {reason}" in model.description


def test_every_reason_is_named_where_no_target_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Built(device=False)
    other.name = "other"
    known(monkeypatch, Built(device=False), other)
    with pytest.raises(UnsupportedError, match="built: no such device; other: no such device"):
        pick()
