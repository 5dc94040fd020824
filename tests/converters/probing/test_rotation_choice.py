"""A rotated model or the model as it is: both are rounded and measured, and the one that loses less is converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgeq.converters.convert import preflight
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.planning.plan import ConversionPlan
from edgeq.converters.probing import rotation_choice
from edgeq.converters.probing.massive import split
from edgeq.converters.probing.rotation_choice import Trial, choose_rotation
from edgeq.format.container import ModelFile
from edgeq.system.machine import cache_folder
from edgeq.tools.cli.main import main

pytestmark = pytest.mark.usefixtures("own_cache")
AUTO = ConvertOptions(
    method="gptq", bits=2, trellis=True, group_size=64, rotate="auto", calibration_rows=8, calibration_length=128
)


def silent(*_: object) -> None:
    pass


def edgeq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama_gqa", intermediate_size=128)


def plan_of(folder: Path, options: ConvertOptions = AUTO) -> ConversionPlan:
    return preflight(str(folder), options)


@pytest.mark.parametrize(("share", "rotated"), [(0.89, True), (0.91, None)])
def test_a_rotation_is_taken_where_it_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, share: float, rotated: bool | None
) -> None:
    runs, notes = list[bool](), list[str]()

    def loss(self: Trial, on_share: Callable[[float, str], None]) -> float:
        runs.append(bool(self.plan.options.rotate))
        return share if self.plan.options.rotate else 1.0

    monkeypatch.setattr(Trial, "loss", loss)
    for _ in range(2):
        plan = choose_rotation(plan_of(folder), silent, notes.append)
        assert plan.fingerprint() == plan_of(folder, replace(AUTO, rotate=rotated)).fingerprint()
    # What was found is kept.
    assert runs == [False, True] and notes[0] == notes[1]
    assert notes[0].startswith("rotated: " if rotated else "not rotated: ") and f"as it is 1, rotated {share}" in notes[0]


def test_both_are_measured_and_a_killed_trial_goes_on_after_the_last_layer(folder: Path) -> None:
    def choose(stop_at: str) -> tuple[list[str], list[str]]:
        labels, notes = list[str](), list[str]()

        def report(done: float, total: float, label: str) -> None:
            assert 0 <= done <= total
            labels.append(label)
            if label == stop_at:
                raise KeyboardInterrupt

        choose_rotation(plan_of(folder), report, notes.append)
        return labels, notes

    layers = [f"trying the model {kind}, layer {i} of 2" for kind in ("as it is", "rotated") for i in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        choose(layers[3])
    probes = cache_folder() / "probes"
    assert [path.suffix for path in probes.glob("*.npz")] == [".npz"]
    labels, notes = choose("")
    assert [label for label in labels if label in layers] == layers[3:] and not [*probes.glob("*.npz")]
    for path in probes.iterdir():
        path.unlink()
    straight, again = choose("")
    assert [label for label in straight if label in layers] == layers and again == notes
    kinds = dict(part.rsplit(" ", 1) for part in notes[0].split("fitted to: ")[1].split(", "))
    assert all(0 < float(loss) < 10 for loss in kinds.values()) and len({*kinds.values()}) == 2


def test_states_that_do_not_fit_are_those_of_no_run(folder: Path, tmp_path: Path) -> None:
    plan = plan_of(folder, replace(AUTO, rotate=None))
    judged, fitted = split(plan.calibration.rows, 256)  # type: ignore[union-attr]
    losses = []
    for damage in (None, b"", b"PK\x03\x04"):
        trial = Trial(plan, judged, fitted, tmp_path / f"{damage!r}.npz", pytest.fail)
        if damage is not None:
            trial.states.write_bytes(damage)
        losses.append(trial.loss(silent))
    assert losses[0] == losses[1] == losses[2]


def test_what_cannot_be_rotated_is_converted_as_it_is(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation_choice, "Trial", pytest.fail)
    notes = list[str]()
    plan = choose_rotation(plan_of(checkpoint("gemma3"), replace(AUTO, trellis=None)), silent, notes.append)
    assert plan.options.rotate is None and "not rotated" in notes[0] and "norms after attention" in notes[0]


def test_the_command_converts_what_it_chose(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.edgeq"
    few = ["--method", "gptq", "--bits", 3, "--group-size", 32, "--calibration-rows", 8, "--calibration-length", 128]
    made = edgeq("convert", folder, "-o", out, *few, "--auto-rotate")
    assert made.exit_code == 0, made.stderr
    (line,) = [line for line in made.stderr.splitlines() if "KL divergence of the decoder layers" in line]
    options: Any = ModelFile.open(out).metadata.provenance["options"]
    assert options.get("rotate") == (True if line.startswith("rotated") else None)
    asked = ["--rotate"] if line.startswith("rotated") else []
    for given in (["--auto-rotate"], asked):
        again = edgeq("convert", folder, "-o", out, *few, *given)
        assert again.exit_code == 0 and "already there" in again.stderr, again.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--method", "rtn"], "--auto-rotate goes with --method gptq, awq+gptq; --method rtn"),
        (["--method", "gptq", "--read", "1MB"], "--auto-rotate tries one codec for all layers"),
        (["--method", "gptq", "--no-rotate"], "give one of them"),
    ],
    ids=str,
)
def test_what_it_does_not_go_with_is_said(folder: Path, tmp_path: Path, options: list[str], says: str) -> None:
    found = edgeq("convert", folder, "-o", tmp_path / "o.edgeq", "--auto-rotate", *options)
    assert found.exit_code != 0 and says in " ".join(found.stderr.split())
