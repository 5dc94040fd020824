"""Vectors of embedding models equal those of transformers, and a text has the same one beside others and in any chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.errors import FormatError, InputError
from edgeq.format.container import ModelFile
from edgeq.network.pooling import EmbeddingPrompts, Pooling
from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Batch, Model
from edgeq.runtime.batching.embedding_scheduler import EmbeddingScheduler
from edgeq.runtime.batching.job import Busy, Job
from edgeq.runtime.network.embedding import check_embeds, finished
from edgeq.runtime.request import Request
from edgeq.runtime.sampling import NOT_FINITE, Sampling
from tests.checkpoints.embeddings import PROMPTS, embedding_checkpoint

Vectors = NDArray[np.float32]
TARGETS = ("reference", "cpu")
# Lengths around tiles, pages and chunks.
LENGTHS = (1, 2, 7, 13, 64, 65, 130, 511)
RNG = np.random.default_rng(4)
TOKENS = [[int(t) for t in RNG.integers(2, 2048, length)] for length in LENGTHS]
KINDS = {
    "qwen3": ("last", {"normalize": True, "ends": True, "prompts": PROMPTS}),
    "llama_gqa": ("mean", {"normalize": False}),
    "mistral": ("last", {"normalize": True}),
    "qwen2": ("mean", {"normalize": True}),
    "opt": ("mean", {"normalize": True}),
}


@pytest.fixture(scope="module")
def source(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            kind, settings = KINDS[family]
            plain = checkpoint(family, initializer_range=0.05)
            made[family] = embedding_checkpoint(plain, tmp_path_factory.mktemp(f"embeds-{family}"), kind, **settings)
        return made[family]

    return get


@pytest.fixture(scope="module")
def last(path: Callable[..., Path]) -> Model:
    return Model.load(path("qwen3", method="none"), threads=1, threads_prefill=1)


@pytest.fixture(scope="module")
def mean(path: Callable[..., Path]) -> Model:
    return Model.load(path("llama_gqa", method="none"), threads=1, threads_prefill=1)


def expected(folder: Path, kind: str, normalize: bool) -> Vectors:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states = [model(torch.tensor([tokens])).last_hidden_state[0] for tokens in TOKENS]
    vectors = torch.stack([each[-1] if kind == "last" else each.mean(0) for each in states])
    found: Vectors = (torch.nn.functional.normalize(vectors, dim=1) if normalize else vectors).numpy()
    return found


def cosines(a: Vectors, b: Vectors) -> Vectors:
    found: Vectors = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", KINDS)
def test_vectors_are_those_of_transformers(family: str, target: str, source: Any, path: Any) -> None:
    kind, settings = KINDS[family]
    wanted = expected(source(family), kind, settings["normalize"])
    with Model.load(path(family, method="none"), target=target, threads=1, threads_prefill=1) as model:
        found = model.embed(TOKENS)
    assert found.dtype == np.float32 and found.shape == wanted.shape
    assert cosines(found, wanted).min() >= 0.9999
    assert np.allclose(np.linalg.norm(found, axis=1), np.linalg.norm(wanted, axis=1), rtol=2e-3)
    with Model.load(path(family, bits=8, group_size=32), target=target, threads=1, threads_prefill=1) as model:
        assert cosines(model.embed(TOKENS), wanted).min() >= 0.998


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["qwen3", "llama_gqa"])
@pytest.mark.parametrize("rows", [0, 24])
def test_a_text_has_the_same_vector_alone_and_in_any_chunks(rows: int, family: str, target: str, path: Any) -> None:
    given: dict[str, Any] = {"target": target, "threads": 1, "threads_prefill": 1}
    with Model.load(path(family, method="none"), **given) as model:
        alone = np.concatenate([model.embed([tokens]) for tokens in TOKENS])
    with Model.load(path(family, method="none"), max_rows=rows, **given) as model:
        assert np.array_equal(model.embed(TOKENS), alone)
        assert np.array_equal(model.embed(TOKENS[::-1]), alone[::-1])


def test_more_texts_than_are_read_at_a_time(mean: Model) -> None:
    many = [tokens[:5] for tokens in TOKENS[2:] for _ in range(20)]
    found = mean.embed(many)
    assert len(found) == len(many) == 120 and np.array_equal(found[::20], mean.embed(many[::20]))


def test_a_string_gets_its_end_and_instruction_and_tokens_stay_as_they_are(last: Model) -> None:
    tokens = last.text.encode("How tall is it?")
    assert tokens[-1] == 1
    assert np.array_equal(last.embed("How tall is it?"), last.embed([tokens]))
    assert not np.array_equal(last.embed([tokens]), last.embed([tokens[:-1]]))
    asked = last.embed(["How tall is it?"], prompt="query")
    assert np.array_equal(asked, last.embed([f"{PROMPTS['query']}How tall is it?"]))
    assert np.array_equal(last.embed(["a"], prompt="document"), last.embed("a"))


def test_dimensions_cut_and_normalize_again(last: Model, mean: Model) -> None:
    whole, cut = last.embed(["a text", "b"]), last.embed(["a text", "b"], dimensions=48)
    assert np.allclose(cut, whole[:, :48] / np.linalg.norm(whole[:, :48], axis=1, keepdims=True), atol=1e-6)
    assert np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    # A model that does not normalize does not with fewer either.
    assert np.array_equal(mean.embed("a text", dimensions=48), mean.embed("a text")[:, :48])


def test_nothing_and_large_numbers() -> None:
    assert np.array_equal(finished(np.zeros(4, np.float32), Pooling("last", True), None), np.zeros(4))
    assert np.allclose(finished(np.full(4, 1e30, np.float32), Pooling("last", True), None), 0.5)


def test_progress_counts_all_tokens(mean: Model) -> None:
    seen: list[tuple[int, int]] = []
    assert mean.embed([], on_progress=lambda done, total: seen.append((done, total))).shape == (0, 128) and not seen
    mean.embed(TOKENS, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (sum(LENGTHS), sum(LENGTHS)) and [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (b"bytes", {}, "`texts` is b'bytes'"),
        ([b"bytes"], {}, "decode them first"),
        (5, {}, "`texts` is 5"),
        ([5], {}, "`texts` is 5; expected a list of token ids"),
        ([""], {}, "an empty text"),
        ([[]], {}, "an empty text"),
        ([[2048]], {}, "token 2048 is not in the vocabulary"),
        ([[True]], {}, "holds True"),
        ([[2] * 513], {}, "the prompt has 513 tokens, the context 512 positions"),
        (["a"], {"dimensions": 0}, "`dimensions` is 0; expected an integer from 1 to 128"),
        (["a"], {"dimensions": 129}, "`dimensions` is 129"),
        (["a"], {"dimensions": True}, "`dimensions` is True"),
        (
            ["a"],
            {"prompt": "summary"},
            "no prompt 'summary'; it has query, document|no prompt 'summary'; it has document, query",
        ),
        (["a"], {"prompt": 5}, "`prompt` is 5"),
        (["a"], {"on_progress": 5}, "`on_progress` is 5"),
    ],
)
def test_what_cannot_be_embedded_is_refused(texts: Any, options: Any, message: str, last: Model) -> None:
    with pytest.raises(InputError, match=message):
        last.embed(texts, **options)


def test_what_embeds_does_not_go_on_and_what_goes_on_does_not_embed(last: Model, tiny_path: Path) -> None:
    for refused in (
        lambda: last.generate("a"),
        lambda: last.chat([{"role": "user", "content": "a"}]),
        lambda: Batch(last, 2),
    ):
        with pytest.raises(InputError, match=r"embeds texts \(last pooling\) and has no head.*Model.embed"):
            refused()
    file = ModelFile.open(tiny_path)
    with pytest.raises(InputError, match="this model continues texts.*not trained for them"):
        check_embeds(file)
    with Model.load(tiny_path, threads=1, threads_prefill=1) as model:
        with pytest.raises(InputError, match="this model continues texts"):
            model.embed("a")
        with pytest.raises(InputError, match="this model continues texts"):
            EmbeddingScheduler(model)


def test_states_that_are_not_finite_are_told(last: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    run = last.program.run
    monkeypatch.setattr(last.program, "run", lambda *a, **k: np.full_like(run(*a, **k), np.nan))
    with pytest.raises(FormatError, match="states that are not finite"):
        last.embed("a")
    assert "logits" in NOT_FINITE


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"prompts": 5}, "not an object"),
        ({"prompts": {"a": 5}}, "prompt 'a' of a model that embeds is not text"),
        ({"prompts": {"a": "x" * (1 << 17)}}, "131073 characters; at most 131072"),
        ({"prompts": {"a": ""}, "default_prompt": "b"}, "default prompt is 'b'"),
        ({"default_prompt": ["a"]}, "default prompt is"),
    ],
)
def test_instructions_of_a_hostile_file(generation: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        EmbeddingPrompts.of(generation)


def job(tokens: list[int], client: str = "") -> Job:
    return Job(Prompt(tokens), Request(), Sampling(), client=client)


def test_texts_of_several_callers_share_runs_and_pages(mean: Model) -> None:
    alone = mean.embed(TOKENS)
    scheduler = EmbeddingScheduler(mean, pages=10)
    tickets = {scheduler.submit(job(tokens, str(i))): i for i, tokens in enumerate(TOKENS)}
    steps, found = 0, dict[int, Vectors]()
    while scheduler.busy:
        updates = scheduler.step()
        free, held, kept = scheduler.pages
        assert free + held == 10 and free >= 0 and not kept
        assert scheduler.running + scheduler.waiting == len(TOKENS) - len(found) - len(updates)
        steps += 1
        for update in updates:
            assert update.vector is not None and update.reason == "stop"
            found[tickets[update.ticket]] = update.vector
    assert np.array_equal(np.stack([found[i] for i in range(len(TOKENS))]), alone)
    assert scheduler.totals.prompt_tokens == sum(LENGTHS) and scheduler.pages == (10, 0, 0)


def test_cancelled_texts_leave_and_a_full_queue_says_so(mean: Model) -> None:
    scheduler = EmbeddingScheduler(mean, queue=1000)
    long = [scheduler.submit(job(TOKENS[-1])) for _ in range(1)]
    waits = scheduler.submit(job(TOKENS[-2]))
    with pytest.raises(Busy, match="641 tokens wait; at most 1000 may"):
        scheduler.submit(job(TOKENS[-1]))
    scheduler.cancel(long[0])
    scheduler.cancel(long[0])
    updates = []
    while scheduler.busy:
        updates += scheduler.step()
    assert [update.ticket for update in updates] == [waits]
    scheduler.cancel(waits)
    assert scheduler.step() == [] and not scheduler.busy and scheduler.pages[1] == 0
    with pytest.raises(InputError, match="513 tokens"):
        scheduler.submit(job([2] * 513))
    with pytest.raises(InputError, match="a cache of 64 positions"):
        EmbeddingScheduler(mean, pages=1)


def test_a_text_that_is_cancelled_while_it_is_read_gives_back_its_pages(path: Any) -> None:
    with Model.load(path("llama_gqa", method="none"), max_rows=24, threads=1, threads_prefill=1) as model:
        scheduler = EmbeddingScheduler(model)
        ticket = scheduler.submit(job(TOKENS[-1]))
        assert scheduler.step() == [] and scheduler.running == 1 and scheduler.pages[1] > 0
        scheduler.cancel(ticket)
        assert scheduler.step() == [] and not scheduler.busy and scheduler.pages == (-1, 0, 0)
