"""A layer that drafts on the emulated device: its drafts are those of the reference, and change no text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.converters.convert import convert
from edgeq.converters.planning.options import ConvertOptions
from edgeq.runtime import Model, Sampling, Session
from edgeq.runtime.network.draft_layer import NEVER, layer_options
from edgeq.runtime.session.runs import BatchItem, run_drafting
from edgeq.targets import TargetChoice, load
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.cuda.supply.ahead import needed
from edgeq.targets.target import Beside
from edgeq.tools.commands.build import workloads
from tests.checkpoints.drafts import add_draft_layer, plan_drafts
from tests.cuda.emulated import EmulatedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(2, 2048, 100)]
GREEDY = Sampling(temperature=0)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Model]]:
    models: list[Model] = []

    def get(path: Path, target: str = "cuda", **options: Any) -> Model:
        found = CudaTarget(EmulatedDevice()) if target == "cuda" else load(target)
        monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(found, []))
        given = {"mode": "a16", "kv": "f16", "context": 192, "max_rows": 100, "max_logits": 8, "draft_layer": True, **options}
        models.append(Model.load(path, target=target, **given))
        return models[-1]

    yield get
    for model in models:
        model.close()


@pytest.fixture
def path(model_path: Callable[..., Path]) -> Path:
    return model_path("qwen3_5_mtp", {**SMALL, "initializer_range": 0.05}, method="rtn", bits=4, group_size=32, draft_head=700)


def drafts_of(session: Session) -> np.ndarray[Any, Any]:
    """Logits of two drafts one after another, which are forgotten again."""
    at = len(session.tokens)
    found = [run_drafting([BatchItem(session, [token], [0])])[0] for token in (7, 11)]
    assert session.rewind(at) == at
    return np.concatenate(found)


def tokens_of(model: Model, prompt: list[int], count: int, **options: Any) -> list[int]:
    generation = model.generate(prompt, max_tokens=count, sampling=GREEDY, ignore_eos=True, **options)
    generation.text()
    return generation.tokens


def test_drafts_are_those_of_the_reference_whatever_came_before(loaded: Callable[..., Model], path: Path) -> None:
    """After a prompt in one run; after one in pieces, drafts that were forgotten, and runs that were started ahead."""
    model, reference = loaded(path), loaded(path, "reference")
    sessions = [each.session() for each in (model, reference)]
    for each in sessions:
        each.prefill(TOKENS[:70])
    found, wanted = map(drafts_of, sessions)
    drafted = wanted > NEVER
    assert np.array_equal(found > NEVER, drafted) and 700 <= drafted[0].sum() < 1024
    assert np.abs(found - wanted)[drafted].max() <= 1e-2 * np.abs(wanted[drafted]).max()
    cut = model.session()
    for begin, end in ((0, 41), (41, 42), (42, 70)):
        cut.prefill(TOKENS[begin:end])
        assert np.array_equal(drafts_of(cut), found) == (end == 70)
    text = tokens_of(model, TOKENS[:70], 6, session=cut)
    # A run that was started ahead is not used: the drafts have written where it did.
    assert cut.tokens == [*TOKENS[:70], *text[:-1]]
    drafts_of(cut)
    cut.decode(text[-1])
    plain = model.session()
    plain.prefill(cut.tokens)
    assert np.array_equal(drafts_of(cut), drafts_of(plain))


def test_a_text_is_the_one_without_drafts(loaded: Callable[..., Model], path: Path) -> None:
    """Over the end of a page."""
    model, plain = loaded(path), loaded(path, draft_layer=False)
    wanted = tokens_of(plain, TOKENS[:56], 14)
    generation = model.generate(TOKENS[:56], max_tokens=14, sampling=GREEDY, ignore_eos=True, draft="mtp", gamma=3)
    generation.text()
    assert generation.tokens == wanted and sum(generation.measurement.speculation.drafted) > 0


@pytest.mark.parametrize("right", [True, False])
def test_planted_drafts_are_counted(
    checkpoint: Callable[..., Path], tmp_path: Path, loaded: Callable[..., Model], right: bool
) -> None:
    folder = tmp_path / "planted"
    shutil.copytree(checkpoint("qwen3_5", dtype="float32", tie_word_embeddings=False, **SMALL), folder)
    add_draft_layer(folder, lambda tensors: plan_drafts(tensors, right))
    convert(str(folder), tmp_path / "m.edgeq", ConvertOptions(method="rtn", bits=4, group_size=32), lambda *_: None)
    generation = loaded(tmp_path / "m.edgeq").generate([9, 4], max_tokens=21, draft="mtp", gamma=4, ignore_eos=True)
    generation.text()
    expected, token = [], 4
    for _ in range(21):
        token = (5 * token + 3) % 2048
        expected.append(token)
    counts = generation.measurement.speculation
    assert generation.tokens == expected and counts.cycles == (4 if right else 20)
    assert (sum(counts.accepted), sum(counts.drafted)) == ((16, 16) if right else (0, 70))


def test_the_layer_takes_pages_states_and_weights_of_the_model(loaded: Callable[..., Model], path: Path) -> None:
    """Its own are counted before anything is allocated, and a pack has the kernels of both."""
    model = loaded(path)
    program, drafting = model.program, model.drafting
    assert isinstance(program, CudaProgram) and isinstance(drafting, CudaProgram)
    assert drafting._pages is program._pages and drafting._states is program._states
    own, all_of_model = drafting.device_bytes, program.device_bytes
    head = model.file.metadata.linears["head"].weights[0].arrays["q"]
    assert drafting._storage.array(head) == program._storage.array(head)
    packed, _ = needed(workloads(model.file, ("a16",), ("f16",)))
    assert {*program._kernels.loaded, *drafting._kernels.loaded} <= set(packed)
    target = CudaTarget(EmulatedDevice())
    beside = Beside(drafting._graph, layer_options(program.options), model.file.metadata.draft_bytes())
    alone, both = (target.room(model.graph, model.file, program.options, each).needed for each in ((), (beside,)))
    assert (alone, both) == (all_of_model, all_of_model + own)
    with_own = CudaProgram(program._device, drafting._graph, model.file, replace(drafting.options))
    assert with_own.device_bytes >= own + program._pages.nbytes + head.nbytes
