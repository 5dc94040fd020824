"""Outliers that only rows of pictures have: the planted copy computes what the source does, its scales are further apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.errors import InputError
from edgeq.runtime import Model
from edgeq.tools.lab import signs
from edgeq.tools.lab.plant_outliers import Kinds, plant

SOURCE = Path(__file__).parents[3] / "models" / "tiny-qwen2vl"


def test_they_are_planted_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--visual is planted alone"):
        plant(SOURCE, tmp_path / "out", Kinds(visual=200, up=3))


@pytest.mark.exhaustive
def test_the_copy_computes_what_the_source_does(tmp_path: Path) -> None:
    plant(SOURCE, tmp_path / "planted", Kinds(visual=200))
    signs.write(tmp_path / "signs", "evaluation", 2)
    found = []
    for source in (SOURCE, tmp_path / "planted"):
        path = convert(
            str(source), tmp_path / f"{source.name}.edgeq", ConvertOptions(method="none", dtype="f32"), lambda *_: None
        )
        with Model.load(path.path, target="cpu", mode="a16") as model:
            message = [{"role": "user", "content": "What does the sign say?"}]
            prompt = model.chat_prompt(message, images=[tmp_path / "signs" / "000000.png"])
            found.append(model.session().prefill(prompt).copy())
    assert np.abs(found[0] - found[1]).max() < 1e-3 * np.abs(found[0]).max()
    scales = {}
    for source in (SOURCE, tmp_path / "planted"):
        signs.write(tmp_path / "samples", "calibration", 8)
        options = ConvertOptions(method="rtn", activations="modality", calibration=tmp_path / "samples")
        file = convert(str(source), tmp_path / f"{source.name}.m.edgeq", options, lambda *_: None)
        activations = [file.metadata.linears[f"layers.{i}.down"].activation for i in range(4)]
        scales[source.name] = np.array([file.array(x.scales) for x in activations if x and x.scales])
    growth = scales["planted"] / scales[SOURCE.name]
    # What pictures reach grew by more than what text reaches, in every layer.
    assert (growth[:, 1] > 2 * growth[:, 0]).all()
