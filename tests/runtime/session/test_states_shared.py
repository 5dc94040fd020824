"""Layers with a state beside other texts: batches, prompts that begin alike, kept prompts, texts that make room or leave."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Batch, Model, Sampling
from edgeq.runtime.batching.job import Job, Ticket
from edgeq.runtime.batching.prefix_tree import PrefixTree
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from edgeq.runtime.session.context_size import context_pages
from edgeq.targets.rows import PAGE, Page, PagePart
from edgeq.targets.states import state_bytes
from tests.runtime.session.running_sum import load_with_sums

TOKENS = [int(t) for t in np.random.default_rng(1).integers(2, 2048, 400)]


SMALLER = {"falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8}}
"""States that are small beside pages, so that texts are not held back by them before they have to make room."""
ROOM = {"falcon_h1": 5}
"""Pages beside what the largest text needs, where all layers have pages: fewer are enough for as many texts."""


@pytest.fixture(scope="module", params=["llama_gqa reference", "llama_gqa cpu", "lfm2 cpu", "qwen3_5 cpu", "falcon_h1 cpu"])
def model(request: pytest.FixtureRequest, model_path: Callable[..., Path]) -> Iterator[Model]:
    family, target = request.param.split()
    path = model_path(family, SMALLER.get(family, {}), bits=4, group_size=32)
    load = load_with_sums if family == "llama_gqa" else Model.load
    threads = 2 if target == "cpu" else 0
    with load(path, target=target, mode="a16", context=320, max_rows=100, threads=threads) as loaded:
        yield loaded


def job(tokens: list[int], count: int = 12, seed: int | None = None, n: int = 1) -> Job:
    sampling = Sampling() if seed is None else Sampling(temperature=0.9, seed=seed)
    return Job(Prompt(tokens), Request(max_tokens=count, ignore_eos=True), sampling, n)


JOBS = [
    job(TOKENS[:130], 20),
    job(TOKENS[:70] + TOKENS[200:230], 30),
    job(TOKENS[:130], 12, seed=3),
    job(TOKENS[300:310], 70),
    job(TOKENS[:129] + TOKENS[5:9], 9),
    job(TOKENS[:66] * 2, 40),
    *(job(TOKENS[i : i + 9], 125) for i in (320, 330, 340)),
]


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    """The tokens of each of JOBS alone."""
    found = []
    for each in JOBS:
        generation = model.generate(each.prompt, max_tokens=each.request.max_tokens, sampling=each.sampling, ignore_eos=True)
        generation.text()
        found.append(generation.tokens)
    return found


def finished(scheduler: Scheduler, tickets: list[Ticket], found: dict[Ticket, list[int]] | None = None) -> list[list[int]]:
    found = {} if found is None else found
    while scheduler.busy:
        for update in scheduler.step():
            assert update.error is None
            found.setdefault(update.ticket, []).extend(piece.token for piece in update.pieces)
    return [found[ticket] for ticket in tickets]


@pytest.mark.parametrize(
    ("shares", "room", "draft"),
    [
        (False, 10, "off"),
        (True, None, "lookup"),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in ((False, None, "off"), (True, 10, "off"), (False, 10, "lookup"))
        ),
    ],
)
def test_a_text_is_what_it_is_alone(
    model: Model, expected: list[list[int]], shares: bool, room: int | None, draft: Any
) -> None:
    """`room`: pages beside what the largest text needs, so that texts have to make room for others."""
    speculator = model.speculator(draft, 3 if draft != "off" else None)
    room = None if room is None else ROOM.get(model.config.model_type, room)
    pages = None if room is None else room + context_pages(model.graph, model.program.options, model.context)
    scheduler = Scheduler(model, 6, pages=pages, shares_prefixes=shares, step_seconds=1e-4, speculator=speculator)
    asked = [i for i, each in enumerate(JOBS) if draft == "off" or each.sampling.temperature == 0]
    assert finished(scheduler, [scheduler.submit(JOBS[i]) for i in asked]) == [expected[i] for i in asked]
    if room and not shares:
        assert scheduler.totals.preemptions > 0
    free, held, idle = scheduler.pages
    assert shares or held == 0
    assert pages is None or free <= pages


@pytest.mark.parametrize("apart", [None, 2])
def test_a_prompt_begins_at_the_deepest_snapshot(
    model: Model, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, apart: int | None
) -> None:
    if apart:
        monkeypatch.setattr(model.program, "snapshot_pages", apart)
    scheduler = Scheduler(model, 2, shares_prefixes=True)
    every = model.program.snapshot_pages == 1
    for i, cached in ((0, 0), (2, 128), (1, 64 if every else 0), (4, 128)):
        ticket = scheduler.submit(JOBS[i])
        assert finished(scheduler, [ticket]) == [expected[i]]
        assert ticket.cached_tokens == cached, i


def test_an_answer_is_found_by_the_turn_that_follows_it(model: Model) -> None:
    scheduler = Scheduler(model, 2, shares_prefixes=True)
    (answer,) = finished(scheduler, [scheduler.submit(job(TOKENS[:100], 60))])
    follows = [*TOKENS[:100], *answer, 7, 8]
    alone = model.generate(follows, max_tokens=9, ignore_eos=True)
    alone.text()
    ticket = scheduler.submit(job(follows, 9))
    assert finished(scheduler, [ticket]) == [alone.tokens] and ticket.cached_tokens == 128


@pytest.mark.parametrize("seats", [1, 3])
def test_texts_of_one_prompt_share_what_was_read(model: Model, seats: int) -> None:
    sampling = Sampling(temperature=0.9, seed=4)
    batch = Batch(model, seats, max_tokens=20, ignore_eos=True)
    answers = {answer.sample: answer.tokens for answer in batch.run([TOKENS[:90]], n=3, sampling=[sampling])}
    first = model.generate(TOKENS[:90], max_tokens=20, sampling=sampling, ignore_eos=True)
    first.text()
    assert answers[0] == first.tokens and len({tuple(tokens) for tokens in answers.values()}) == 3
    assert batch.measurement.prompt_tokens == 90


def test_coming_going_and_leaving_at_any_moment_changes_no_text(model: Model, expected: list[list[int]]) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        pages = context_pages(model.graph, model.program.options, model.context) + rng.choice([5, 8, 20])
        scheduler = Scheduler(model, 3, pages=pages, shares_prefixes=rng.random() < 0.7, step_seconds=1e-4)
        tickets, found, left = dict[Ticket, int](), dict[Ticket, list[int]](), [0, 1, 2, 3, 4, 5, 0, 3]
        while left or scheduler.busy:
            if left and rng.random() < 0.3:
                which = left.pop()
                tickets[scheduler.submit(JOBS[which])] = which
            if tickets and rng.random() < 0.03:
                gone = rng.choice(list(tickets))
                scheduler.cancel(gone)
                tickets.pop(gone)
            for update in scheduler.step():
                assert update.error is None
                found.setdefault(update.ticket, []).extend(piece.token for piece in update.pieces)
        assert all(found[ticket] == expected[which] for ticket, which in tickets.items()), seed


def kept(model: Model, store: PromptStore, tokens: list[int], count: int = 8) -> tuple[list[int], int]:
    """The text after a prompt by a scheduler that has just begun, and how many tokens it did not have to run."""
    scheduler = Scheduler(model, 2, shares_prefixes=True, store=store)
    ticket = scheduler.submit(job(tokens, count))
    (found,) = finished(scheduler, [ticket])
    store.flush()
    return found, ticket.cached_tokens


def test_after_a_restart_a_prompt_is_not_read_again(model: Model, tmp_path: Path) -> None:
    prompt = TOKENS[:235]
    first = model.generate(prompt, max_tokens=8, ignore_eos=True)
    first.text()
    store = model.prompt_store(tmp_path / "kept", 1 << 30)
    # Four whole pages are kept: the last one is filled by the answer.
    kept(model, store, TOKENS[: 4 * PAGE - 10], 12)
    assert kept(model, store, prompt) == (first.tokens, 192)
    sizes = {path.stat().st_size for path in (tmp_path / "kept").glob("*.kv")}
    snapshot = model.program.saved_bytes[1]  # type: ignore[attr-defined]
    page = len(model.program.page_memory())
    without = set() if model.program.snapshot_pages == 1 else {128 + 4 * PAGE + page + 16}
    assert sizes == {128 + 4 * PAGE + page + snapshot + 16} | without


def test_a_kept_page_without_a_snapshot_is_read_again(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = TOKENS[:235]
    first = model.generate(prompt, max_tokens=8, ignore_eos=True)
    first.text()
    with monkeypatch.context() as patched:
        patched.setattr(model.program, "snapshot_pages", 2)
        kept(model, model.prompt_store(tmp_path / "kept", 1 << 30), TOKENS[: 4 * PAGE + 5], 12)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "kept").glob("*.kv"))
    assert len(set(sizes)) == 2, "with a snapshot and without"
    # Three pages are there, but after the third no text can go on.
    assert kept(model, model.prompt_store(tmp_path / "kept", 1 << 30), prompt) == (first.tokens, 128)


def test_a_damaged_snapshot_is_not_used(model: Model, tmp_path: Path) -> None:
    prompt = TOKENS[:235]
    first = model.generate(prompt, max_tokens=8, ignore_eos=True)
    first.text()
    store = model.prompt_store(tmp_path / "kept", 1 << 30)
    kept(model, store, TOKENS[: 4 * PAGE - 10], 12)
    for path in (tmp_path / "kept").glob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
    assert kept(model, store, prompt) == (first.tokens, 0) and store.errors == 1
    for path in (tmp_path / "kept").glob("*.kv"):
        # Another size of a snapshot in the header, with the right digest.
        data = bytearray(path.read_bytes())
        data[84:88] = bytes(4)
        body = bytes(data[:-16])
        path.write_bytes(body + xxhash.xxh3_128_digest(body))
    assert kept(model, store, prompt) == (first.tokens, 0)


def pages(*snapshots: bool) -> list[Page]:
    return [Page(PagePart(), PagePart(), PagePart() if snapshot else None) for snapshot in snapshots]


def test_the_tree_ends_at_a_snapshot_and_learns_those_that_were_missed() -> None:
    tree, path = PrefixTree(snapshot_pages=1), list[Any]()
    tokens = list(range(5 * PAGE))
    tree.extend("", path, tokens, (), pages(True, False, True, False, False))
    for length, found in ((5, 3), (3, 3), (2, 1), (1, 1)):
        assert len(tree.find("", Prompt([*tokens[: length * PAGE], 1]))) == found
    again = list[Any]()
    tree.extend("", again, tokens[: 2 * PAGE], (), pages(True, True))
    assert len(tree.find("", Prompt([*tokens[: 2 * PAGE], 1]))) == 2


def test_the_tree_keeps_large_snapshots_where_texts_may_go_on() -> None:
    tree, path, other = PrefixTree(snapshot_pages=4), list[Any](), list[Any]()
    tokens = list(range(8 * PAGE))
    for count in range(1, 9):
        tree.extend("", path, tokens[: count * PAGE], (), pages(*[True] * count))
        if count == 2:
            path[-1].ends = True
        if count == 6:
            tree.extend("", other, [*tokens[: 6 * PAGE], *[7] * PAGE], (), pages(*[False] * 6, True))
    assert [node.page.snapshot is not None for node in path] == [False, True, False, True, False, True, False, True]


def test_the_states_of_texts_are_counted(model: Model) -> None:
    states, page = 2 * state_bytes(model.graph.states), model.graph.page_bytes(model.program.options.kv)
    scheduler = Scheduler(model, 2, pages=200)
    tickets = [scheduler.submit(job(TOKENS[:10], 5)) for _ in range(2)]
    scheduler.step()
    assert scheduler.pages[1] == -(-(2 * states + 2 * page) // page)
    finished(scheduler, tickets)
    assert scheduler.pages[:2] == (200, 0)
