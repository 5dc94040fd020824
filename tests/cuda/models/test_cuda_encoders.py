"""Models whose tokens see both ways, on the emulated device: a text is one run, in which rows see later ones too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.runtime import Model
from edgeq.targets import TargetChoice, load
from edgeq.targets.cuda import CudaTarget
from tests.checkpoints.encoders import bert, embedding_gemma, modernbert, nomic_bert, xlm_roberta
from tests.cuda.emulated import EmulatedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

RNG = np.random.default_rng(4)
# Around the window and pages: of fewer rows than fused launches take, and of more.
TOKENS = [[int(t) for t in RNG.integers(5, 2048, length)] for length in (1, 10, 19, 65)]


@pytest.mark.parametrize(
    "maker", [bert, xlm_roberta, modernbert, nomic_bert, embedding_gemma], ids=lambda maker: maker.__name__
)
def test_vectors_are_those_of_the_reference_whatever_is_read_beside_a_text(
    maker: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "edgeq.runtime.model.pick",
        lambda name, file: TargetChoice(CudaTarget(EmulatedDevice()) if name == "cuda" else load(name), []),
    )
    path = tmp_path / "embeds.edgeq"
    convert(str(maker(tmp_path / "source")), path, ConvertOptions(method="rtn", bits=4, group_size=32), lambda *_: None)
    with Model.load(path, target="reference", mode="a16", kv="f16") as model:
        wanted = model.embed(TOKENS)
    with Model.load(path, target="cuda", mode="a16", kv="f16") as model:
        found = model.embed(TOKENS)
        assert np.array_equal(np.concatenate([model.embed([tokens]) for tokens in TOKENS]), found)
    distances = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert distances.max() <= 2e-3 and np.linalg.norm(wanted[1:] - wanted[:-1], axis=1).min() > 0.05
