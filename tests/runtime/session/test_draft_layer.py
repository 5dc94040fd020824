"""A layer that drafts: its drafts are those of the formula, and change how fast a text comes, never the text."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edgeq.errors import InputError, ResourceError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Batch, Model, Sampling, Session
from edgeq.runtime.batching.job import Job, Ticket
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.network.draft_layer import NEVER, drafting_decoder
from edgeq.runtime.request import Request
from edgeq.runtime.session.context_size import cache_bytes, context_pages
from edgeq.runtime.session.runs import BatchItem, run_drafting
from edgeq.runtime.speculative.planner import DraftPlanner, Run
from edgeq.runtime.speculative.speculator import layer_for
from edgeq.targets import TargetChoice
from edgeq.targets.family_operations import RowBefore
from edgeq.targets.graph import Graph
from edgeq.targets.reference import ReferenceTarget
from edgeq.targets.rows import PAGE
from edgeq.targets.target import Options
from tests.checkpoints.drafts import add_draft_layer, drafted_states, plan_drafts, read_tensors

TOKENS = [int(t) for t in np.random.default_rng(3).integers(2, 2048, 200)]
PROMPTS = (TOKENS[:90], TOKENS[90:101], TOKENS[120:184])
OPTIONS: dict[str, Any] = {"context": 256, "max_rows": 50, "max_logits": 32}


@pytest.fixture(scope="module", params=["reference a16", "cpu a16", "cpu a8"])
def pair(request: pytest.FixtureRequest, model_path: Callable[..., Path]) -> Iterator[tuple[Model, Model]]:
    """One file with its layer that drafts some of the tokens, and without."""
    target, mode = request.param.split()
    path = model_path("qwen3_5_mtp", bits=4, group_size=32, draft_head=700)
    threads = 2 if target == "cpu" else 0
    given = OPTIONS | {"target": target, "mode": mode, "threads": threads}
    with Model.load(path, draft_layer=True, **given) as drafting, Model.load(path, **given) as plain:
        yield drafting, plain


def tokens_of(model: Model, prompt: Sequence[int], **options: Any) -> list[int]:
    generation = model.generate(prompt, **{"max_tokens": 24, "ignore_eos": True, **options})
    generation.text()
    return generation.tokens


def drafts_of(session: Session) -> np.ndarray[Any, Any]:
    """Logits of two drafts one after another, which are forgotten again."""
    at = len(session.tokens)
    found = [run_drafting([BatchItem(session, [token], [0])])[0] for token in (7, 11)]
    assert session.rewind(at) == at
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("family", "target"),
    [("qwen3_5", "reference"), ("qwen3_5", "cpu"), ("qwen3_5_moe", "reference"), ("qwen3_next", "reference")],
)
def test_drafts_are_those_of_the_formula(
    checkpoint: Callable[..., Path], model_path: Callable[..., Path], family: str, target: str
) -> None:
    import torch
    import transformers

    folder = checkpoint(f"{family}_mtp", dtype="float32")
    tensors = read_tensors(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    path = model_path(f"{family}_mtp", method="none", dtype="f32")
    with Model.load(path, target=target, mode="a16", draft_layer=True, threads=1, **OPTIONS) as model:
        session, length = model.session(), PAGE + 7
        session.prefill(TOKENS[: length - 1])
        # Drafts that are forgotten, and rows that follow after them, change nothing.
        for end in (length, length + 1, length + 9):
            list(session.all_logits(TOKENS[len(session.tokens) : end]))
            with torch.no_grad():
                found = network.model(torch.tensor([TOKENS[:end]])).last_hidden_state[0].double().numpy()
            tokens, hidden = [*TOKENS[:end], TOKENS[end]], np.concatenate([np.zeros((1, found.shape[1])), found])
            for _ in range(3):
                states = drafted_states(folder, tensors, tokens, hidden)
                expected = states[-1] @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T
                (logits,) = run_drafting([BatchItem(session, tokens[-1:], [0])])
                assert np.abs(logits[0] - expected).max() < 2e-3 * np.abs(expected).max()
                tokens.append(int(expected.argmax()))
                hidden = np.concatenate([hidden, states[-1:]])
            assert session.rewind(end) == end


def test_the_tokens_that_it_drafts_have_the_logits_of_the_whole_head(
    pair: tuple[Model, Model], model_path: Callable[..., Path]
) -> None:
    """Bit by bit, with more bits for the head's rows and fewer, from runs that begin in any block."""
    some = pair[0]
    begin, end, *_ = bounds = some.config.draft_tokens
    assert begin == 0 and end >= 704 and set(bounds) <= {*range(0, 2049, 16)}
    given = OPTIONS | {"target": some.target, "mode": some.program.options.mode}
    path = model_path("qwen3_5_mtp", bits=4, group_size=32)
    with Model.load(path, draft_layer=True, threads=2 if some.target == "cpu" else 0, **given) as whole:
        assert not whole.config.draft_tokens
        sessions = [model.session() for model in (some, whole)]
        for session in sessions:
            session.prefill(TOKENS[:20])
        found, wanted = map(drafts_of, sessions)
        drafted = np.zeros(2048, np.bool_)
        for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
            drafted[begin:end] = True
        assert np.array_equal(found[:, drafted], wanted[:, drafted]) and np.all(found[:, ~drafted] == NEVER)


def test_the_layer_beside_it_changes_no_bit_of_the_model(pair: tuple[Model, Model]) -> None:
    drafting, plain = pair
    assert drafting.drafts and not plain.drafts and len(drafting.graph.cache) == len(plain.graph.cache) + 1
    first, second = (model.session() for model in pair)
    assert np.array_equal(first.prefill(PROMPTS[0]), second.prefill(PROMPTS[0]))
    for token in TOKENS[100:103]:
        assert np.array_equal(first.decode(token), second.decode(token))


@pytest.mark.parametrize(
    ("gamma", "draft"),
    [
        # Every number in one of the ways, by turns, in `make test`.
        pytest.param(gamma, draft, marks=pytest.mark.exhaustive if (i + j) % 2 else ())
        for i, gamma in enumerate((1, 3, 7, None))
        for j, draft in enumerate(("mtp", "auto"))
    ],
)
def test_greedy_text_is_the_one_without_drafts(pair: tuple[Model, Model], draft: Any, gamma: int | None) -> None:
    drafting, plain = pair
    for prompt in PROMPTS[: 3 if gamma in (3, None) else 1]:
        assert tokens_of(drafting, prompt, draft=draft, gamma=gamma) == tokens_of(plain, prompt)


def test_the_cache_after_drafts_is_the_plain_one_bit_by_bit(pair: tuple[Model, Model], tmp_path: Path) -> None:
    model = pair[0]
    plain, drafted = model.session(), model.session()
    assert tokens_of(model, PROMPTS[2], session=plain) == tokens_of(model, PROMPTS[2], session=drafted, draft="mtp", gamma=5)
    assert plain.tokens == drafted.tokens
    drafted.save(tmp_path / "saved")
    loaded, forked = model.session(), drafted.fork()
    loaded.load(tmp_path / "saved")
    for session in (plain, drafted, loaded, forked):
        session.prefill(TOKENS[:5])
    found = [drafts_of(session) for session in (plain, drafted, loaded, forked)]
    assert all(np.array_equal(each, found[0]) for each in found)


def test_a_random_walk_leaves_the_drafts_of_a_plain_run(pair: tuple[Model, Model], tmp_path: Path) -> None:
    """Whatever a session went through, over two pages and their snapshots, the layer drafts the same bits."""
    model, rng = pair[0], random.Random(5)
    session = model.session()
    session.prefill(TOKENS[:40])
    for step in range(24):
        at = len(session.tokens)
        kind = (
            ("run", "draft", "rewind", "back", "fork", "save")[step % 6] if step < 12 else rng.choice(["run", "draft", "back"])
        )
        if kind == "run" and at < 150:
            session.prefill([rng.randrange(2, 2048) for _ in range(rng.choice([1, 5, 17, 30]))])
        elif kind == "draft":
            drafts_of(session)
        elif kind == "rewind":
            session.rewind(rng.randrange(at - 9, at))
        elif kind == "back":
            session.rewind(rng.randrange(at // 2, at))
        elif kind == "fork":
            before, session = session, session.fork()
            before.prefill(TOKENS[:9])
            before.close()
        elif kind == "save":
            session.save(tmp_path / "saved")
            session = model.session()
            session.load(tmp_path / "saved")
        if not session.tokens:
            session.prefill(TOKENS[:40])
        if step % 4 == 3:
            with model.session() as plain:
                plain.prefill(session.tokens)
                assert np.array_equal(drafts_of(session), drafts_of(plain))


def test_texts_that_come_and_make_room_are_what_they_are_alone(pair: tuple[Model, Model]) -> None:
    drafting, plain = pair
    jobs = [
        Job(Prompt(TOKENS[a:b]), Request(max_tokens=30, ignore_eos=True), Sampling(), 1) for a, b in ((0, 90), (0, 70), (5, 99))
    ]
    pages = 2 + context_pages(drafting.graph, drafting.program.options, drafting.context)
    scheduler = Scheduler(
        drafting, 3, pages=pages, shares_prefixes=True, step_seconds=1e-4, speculator=drafting.speculator("mtp", 3)
    )
    tickets, found = [scheduler.submit(each) for each in jobs], dict[Ticket, list[int]]()
    while scheduler.busy:
        for update in scheduler.step():
            assert update.error is None
            found.setdefault(update.ticket, []).extend(piece.token for piece in update.pieces)
    for job, ticket in zip(jobs, tickets, strict=True):
        assert found[ticket] == tokens_of(plain, job.prompt.tokens, max_tokens=30)


def test_several_texts_draft_together(pair: tuple[Model, Model]) -> None:
    drafting, plain = pair
    batch = Batch(drafting, 3, max_tokens=20, ignore_eos=True, draft="mtp", gamma=3)
    found = {answer.index: answer.tokens for answer in batch.run([list(prompt) for prompt in PROMPTS])}
    assert [found[i] for i in range(3)] == [tokens_of(plain, prompt, max_tokens=20) for prompt in PROMPTS]


def test_sampled_text_with_drafts_takes_its_tokens_from_the_logits(pair: tuple[Model, Model]) -> None:
    """The law of what is accepted is tested in test_speculate.py."""
    model, sampling = pair[0], Sampling(temperature=0.8, top_k=5, seed=4)
    generation = model.generate(PROMPTS[0], max_tokens=16, draft="mtp", gamma=3, sampling=sampling, ignore_eos=True)
    generation.text()
    session = model.session()
    logits = session.prefill(PROMPTS[0])
    for token in generation.tokens:
        assert token in np.argsort(-logits)[:5]
        logits = session.decode(token)
    assert sum(generation.measurement.speculation.drafted)


@pytest.mark.parametrize("right", [True, False])
def test_planted_drafts_are_counted(checkpoint: Callable[..., Path], tmp_path: Path, right: bool) -> None:
    """A layer that is always right gives gamma + 1 tokens a cycle, one that is always wrong a token."""
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    folder = tmp_path / "planted"
    shutil.copytree(checkpoint("qwen3_5", dtype="float32", tie_word_embeddings=False), folder)
    add_draft_layer(folder, lambda tensors: plan_drafts(tensors, right))
    convert(str(folder), tmp_path / "planted.edgeq", ConvertOptions(method="rtn", bits=8), lambda *_: None)
    with Model.load(tmp_path / "planted.edgeq", target="cpu", threads=1, draft_layer=True, **OPTIONS) as model:
        generation = model.generate([9, 4], max_tokens=21, draft="mtp", gamma=4, ignore_eos=True)
        generation.text()
        expected, token = [], 4
        for _ in range(21):
            token = (5 * token + 3) % 2048
            expected.append(token)
        assert generation.tokens == expected
        counts = generation.measurement.speculation
        # The first token comes of the prompt.
        assert counts.cycles == (4 if right else 20) and counts.tokens == 20
        drafted = [4, 4, 4, 4] if right else [19, 18, 17, 16]
        assert counts.drafted[:5] == [*drafted, 0] and counts.accepted[:5] == ([*drafted, 0] if right else [0] * 5)
        assert counts.acceptance == (1.0 if right else 0.0)


@pytest.mark.parametrize("better", ["mtp", "mode"])
def test_of_two_sources_the_one_is_taken_that_pays(better: str) -> None:
    planner, taken = DraftPlanner(None, 7), list[str]()
    for _ in range(400):
        plan = planner.plan(1, 7, None, ("mtp", "mode"))
        if plan.gamma:
            planner.record(cast(Run, plan.source), 1, 0.1)
            planner.acceptance[plan.source].count(plan.gamma if plan.source == better else 0, plan.gamma)
            taken.append(plan.source)
        planner.record("exact", plan.gamma + 1, 1 + 0.05 * plan.gamma)
    assert len(taken) > 300 and set(taken[-200:]) == {better}


class WithoutRowBefore(ReferenceTarget):
    """A target that lacks an operation of the layer."""

    def compile(self, graph: Graph, *given: Any, **named: Any) -> Any:
        if any(isinstance(each, RowBefore) for each in graph.operations):
            raise UnsupportedError("no RowBefore here")
        return super().compile(graph, *given, **named)


def test_what_a_target_lacks_leaves_the_layer_out_where_nobody_asked_for_it(
    model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_path("qwen3_5_mtp", bits=4, group_size=32)
    monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(WithoutRowBefore(), []))
    assert layer_for("qspec", "auto") == "auto" and layer_for("auto", "mtp") is True and layer_for("both") is False
    with Model.load(path, draft_layer=layer_for("auto"), context=64) as model:
        assert model.description.endswith("; without the layer that drafts: no RowBefore here")
        assert len(tokens_of(model, TOKENS[:5], max_tokens=3, draft="auto")) == 3
    with pytest.raises(UnsupportedError, match="no RowBefore here"):
        Model.load(path, draft_layer=layer_for("mtp"), context=64)


def test_memory_for_the_layer_is_asked_for_before_the_context_is_chosen(
    model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the layer, and the buffers that it runs in alone."""
    path = model_path("qwen3_5_mtp", bits=4, group_size=32)
    file, options = ModelFile.open(path), Options("a16", max_rows=50)
    graph = drafting_decoder(file.metadata)
    decoder_alone = ReferenceTarget().room(graph, file, options).needed + cache_bytes(graph, options, 64)
    available = decoder_alone + file.metadata.draft_bytes()
    monkeypatch.setattr("edgeq.targets.host.available_bytes", lambda: available)
    with pytest.raises(ResourceError, match="no context fits"):
        Model.load(path, target="reference", mode="a16", max_rows=50, max_logits=1, draft_layer=True)
    available += 1 << 16
    with Model.load(path, target="reference", mode="a16", max_rows=50, max_logits=1, draft_layer=True) as model:
        assert model.drafts and model.context == 64


def test_what_has_no_layer_is_refused_in_one_sentence(pair: tuple[Model, Model], model_path: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="runs without its layer that drafts; load it with `draft_layer=True`"):
        pair[1].generate(PROMPTS[1], draft="mtp")
    path = model_path("qwen3_5", bits=4, group_size=32)
    with Model.load(path, target="reference", draft_layer=True, context=64) as model:
        assert not model.drafts
        with pytest.raises(InputError, match=r"edgeq has no layer that drafts \(multi-token prediction"):
            model.generate(PROMPTS[1], draft="mtp")
    with pytest.raises(InputError, match="draft_layer"):
        Model.load(path, draft_layer=1)  # type: ignore[arg-type]
