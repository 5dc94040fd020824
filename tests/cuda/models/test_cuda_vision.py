"""Models that see, on the emulated device: the tower and the decoder that reads its features, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vision_checkpoints import MODELS, build

from edgeq.converters.convert import ConvertOptions, convert
from edgeq.runtime import Model, Prompt
from edgeq.targets import TargetChoice, load
from edgeq.targets.cuda import CudaTarget
from tests.cuda.emulated import EmulatedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

MAX_ERROR = 1e-2
"""As a share of the largest logit of the reference, in a16; the towers keep their own mode."""


def asked(model: Model) -> Prompt:
    picture = Image.linear_gradient("L").resize((70, 50)).convert("RGB")
    return model.chat_prompt([{"role": "user", "content": "What is it?"}], images=[picture])


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("states")])
def test_a_prompt_with_a_picture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = build(tmp_path / name, name), tmp_path / "m.edgeq"
    convert(str(source), path, ConvertOptions(method="rtn", bits=8, group_size=32), lambda *_: None)
    results = []
    targets: tuple[Callable[[], object], ...] = (lambda: load("reference"), lambda: CudaTarget(EmulatedDevice()))
    for target in targets:
        monkeypatch.setattr("edgeq.runtime.model.pick", lambda *_: TargetChoice(target(), []))  # type: ignore[arg-type]  # noqa: B023
        with Model.load(path, context=256, mode="a16") as model:
            results.append(model.session().prefill(asked(model)).copy())
            blind = model.session().prefill(model.chat_prompt([{"role": "user", "content": "What is it?"}])).copy()
    error = np.abs(results[1] - results[0]).max() / np.abs(results[0]).max()
    print(f"{name}: largest error {error:.1e} of the largest logit")
    assert error <= MAX_ERROR
    assert not np.allclose(blind, results[1])
