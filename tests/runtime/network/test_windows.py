"""Layers with a window drop what no row sees any more: the same bits in less memory, wherever a text goes on."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from edgeq.errors import FormatError, ResourceError
from edgeq.pictures.prompt import Prompt
from edgeq.runtime import Model, Sampling, Session
from edgeq.runtime.batching.job import Job
from edgeq.runtime.batching.prefix_tree import PrefixTree
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from edgeq.runtime.session.cache import REWIND, KVCache, windowed_pages
from edgeq.runtime.session.context_size import cache_bytes, choose_context, context_pages
from edgeq.targets.rows import PAGE, Page, PagePart
from edgeq.targets.target import MemoryNeed

WINDOW = 24
TOKENS = [int(t) for t in np.random.default_rng(1).integers(2, 2048, 700)]


IN_TURN = [pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gemma3 reference", "gemma4 cpu")]


@pytest.fixture(scope="module", params=[*IN_TURN, "gemma3 cpu", "mistral cpu"])
def model(request: pytest.FixtureRequest, model_path: Callable[..., Path]) -> Model:
    family, target = request.param.split()
    path = model_path(family, {"max_position_embeddings": 1024}, bits=4, group_size=32)
    threads = 1 if target == "cpu" else 0
    return Model.load(path, target=target, mode="a16", context=704, max_rows=100, threads=threads)


def everything(model: Model) -> Session:
    """A session that drops nothing."""
    session = model.session()
    session._cache = KVCache(0)
    return session


def dropped(session: Session) -> list[bool]:
    return [page.windowed is None for page in session.pages]


def test_a_long_text_holds_its_window_and_gives_the_same_bits(model: Model) -> None:
    session, whole = model.session(), everything(model)
    assert np.array_equal(session.prefill(TOKENS[:600]), whole.prefill(TOKENS[:600]))
    for token in TOKENS[600:640]:
        assert np.array_equal(session.decode(token), whole.decode(token))
    held = len(session.pages) - sum(dropped(session))
    assert len(session.pages) == 10 and held <= windowed_pages(WINDOW, 100) and held < 8
    assert not any(dropped(whole))


def test_a_random_walk_gives_the_bits_of_a_session_that_drops_nothing(model: Model, tmp_path: Path) -> None:
    rng, kinds = random.Random(2), set[str]()
    session, whole = model.session(), everything(model)
    for step in range(120):
        at = len(session.tokens)
        kind = rng.choice(["run", "run", "draft", "rewind", "back", "prompt", "fork", "save"])
        if kind == "run" and at < 600:
            tokens = [rng.randrange(2, 2048) for _ in range(rng.choice([1, 3, 64, 90]))]
            found = [np.concatenate(list(each.all_logits(tokens))) for each in (session, whole)]
            assert np.array_equal(*found)
        elif kind == "draft" and 0 < at < 690:
            for token in TOKENS[:7]:
                session.decode(token)
            assert session.rewind(at) == at
        elif kind == "rewind" and at:
            length = max(0, at - rng.randrange(1, 9))
            assert session.rewind(length) == length == whole.rewind(length)
        elif kind == "back" and at and step % 3 == 0:
            length = session.rewind(rng.randrange(at))
            assert whole.rewind(length) == length
        elif kind == "prompt" and at < 600:
            assert np.array_equal(session.prefill(TOKENS[at : at + 70]), whole.prefill(TOKENS[at : at + 70]))
        elif kind == "fork":
            before, session = session, session.fork()
            if at < 690:
                before.decode(7)
            before.close()
        elif kind == "save" and at:
            session.save(tmp_path / "a")
            session = model.session()
            session.load(tmp_path / "a")
        else:
            continue
        kinds.add(kind)
        assert session.tokens == whole.tokens
    assert len(kinds) == 7


def test_the_end_of_a_prompt_can_be_gone_back_to_and_what_is_before_it_is_read_again(model: Model) -> None:
    session = model.session()
    session.prefill(TOKENS[:300])
    for token in TOKENS[300:600]:
        session.decode(token)
    other = [*TOKENS[:290], *TOKENS[400:450]]
    assert session.fork().keep_prefix([*TOKENS[:100], 5, 6]) in (0, 64)
    assert session.keep_prefix(other) == 290
    assert np.array_equal(session.prefill(other[290:]), everything(model).prefill(other))


def test_what_was_drawn_after_the_end_is_forgotten(model: Model) -> None:
    session, tokens = model.session(), TOKENS[:500]
    whole = model.generate(tokens, max_tokens=40, ignore_eos=True, session=everything(model))
    drafted = model.generate(tokens, max_tokens=40, ignore_eos=True, session=session, draft="lookup", gamma=5)
    assert (whole.text(), whole.tokens) == (drafted.text(), drafted.tokens)
    assert len(session.tokens) == 500 + 39 and sum(dropped(session)) > 3


def test_a_damaged_session_that_lacks_what_the_next_token_sees_is_refused(model: Model, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(TOKENS[:400])
    session.save(tmp_path / "a")
    data, flags = (tmp_path / "a").read_bytes(), 80 + 4 * 400
    least, most = struct.unpack_from("<I", data, 60)[0], struct.unpack_from("<I", data, 12)[0]
    assert data[flags : flags + 7] == bytes(not gone for gone in dropped(session)) and most > least
    kept = data[: flags + 6] + b"\0" + data[flags + 7 : -16 - (most - least)]
    (tmp_path / "a").write_bytes(kept + xxhash.xxh3_128_digest(kept))
    with pytest.raises(FormatError, match="what the next token sees"):
        model.session().load(tmp_path / "a")


def job(model: Model, tokens: list[int], count: int, seed: int, n: int = 1) -> Job:
    request = Request(max_tokens=count, ignore_eos=True)
    return Job(model.prompt(tokens), request, Sampling(temperature=1.0, seed=seed), n, "", "")


def answers(model: Model, scheduler: Scheduler, jobs: list[Job]) -> list[list[int]]:
    found: dict[tuple[Any, int], list[int]] = {}
    tickets = [scheduler.submit(each) for each in jobs]
    while scheduler.busy:
        for update in scheduler.step():
            assert not update.error, update.error
            found.setdefault((tickets.index(update.ticket), update.sample), []).extend(p.token for p in update.pieces)
    return [found[key] for key in sorted(found)]


def alone(model: Model, each: Job) -> list[int]:
    count, session = each.request.max_tokens, everything(model)
    text = model.generate(each.prompt, max_tokens=count, sampling=each.sampling, ignore_eos=True, session=session)
    text.text()
    return text.tokens


@pytest.mark.parametrize("shares", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_texts_in_little_memory_are_what_they_are_alone(model: Model, shares: bool) -> None:
    """Beginnings that are shared, answers that go on, texts that make room for others."""
    jobs = [job(model, [*TOKENS[: 130 * (1 + i % 3)], i], 40 + 20 * i, i) for i in range(6)]
    pages = context_pages(model.graph, model.program.options, model.context)
    scheduler = Scheduler(model, 4, pages=pages, shares_prefixes=shares)
    wanted = [alone(model, each) for each in jobs]
    assert answers(model, scheduler, jobs) == wanted
    again = [job(model, [*each.prompt.tokens, *tokens], 20, 9) for each, tokens in zip(jobs, wanted, strict=True)]
    assert answers(model, scheduler, again) == [alone(model, each) for each in again]
    assert shares or scheduler.pages[1] == 0


def test_a_text_longer_than_whole_pages_would_hold_has_room(model: Model) -> None:
    pages = context_pages(model.graph, model.program.options, model.context)
    assert pages < model.context // PAGE
    each = job(model, TOKENS[:650], 40, 1)
    assert answers(model, Scheduler(model, 2, pages=pages), [each]) == [alone(model, each)]


def test_prompts_on_disk_give_the_same_texts_where_windows_were_dropped(model: Model, tmp_path: Path) -> None:
    each = job(model, TOKENS[:520], 20, 1)
    longer = job(model, TOKENS[:640], 20, 2)
    for text in (each, longer, longer, job(model, TOKENS[:300], 20, 3)):
        store = model.prompt_store(tmp_path / "kept", 1 << 30)
        scheduler = Scheduler(model, 2, shares_prefixes=True, store=store)
        assert answers(model, scheduler, [text]) == [alone(model, text)]
        tree = scheduler._shared.tree
        assert tree is not None
        tree.drop_windows()
        store.flush()
        assert answers(model, scheduler, [text]) == [alone(model, text)]
        store.close()
        assert store.errors == 0


def pages(count: int) -> list[Page]:
    return [Page(PagePart(), PagePart()) for _ in range(count)]


def test_the_tree_keeps_windows_where_texts_may_go_on() -> None:
    tree, old, new = PrefixTree(window=PAGE + 2), list[Any](), list[Any]()
    tokens = list(range(10 * PAGE))
    tree.extend("", old, tokens, (), pages(10))
    tree.extend("", new, [*tokens[: 4 * PAGE], *[7] * PAGE], (), pages(5))
    old[6].ends = True
    tree.drop_windows()
    assert [node.page.windowed is not None for node in old] == [False, False, True, True, False, True, True, False, True, True]
    for length, found in ((10, 10), (9, 7), (8, 7), (7, 7), (6, 4), (4, 4), (3, 0)):
        assert len(tree.find("", Prompt([*tokens[: length * PAGE], 1]))) == found
    again = list[Any]()
    tree.extend("", again, tokens[: 2 * PAGE], (), pages(2))
    assert len(tree.find("", Prompt([*tokens[: 2 * PAGE], 1]))) == 2, "what was missed is kept from then on"


def test_the_context_that_fits_is_longer_where_windows_are_short(model: Model) -> None:
    options, (full, windowed) = model.program.options, model.graph.part_bytes(model.program.options.kv)
    most = windowed_pages(WINDOW, options.max_rows)
    assert cache_bytes(model.graph, options, 100 * PAGE) == 100 * full + most * windowed
    assert cache_bytes(model.graph, options, PAGE + 1) == 2 * (full + windowed)
    room = MemoryNeed(most * windowed + 40 * full + 1000, 1000)

    def size(positions: int) -> int:
        return cache_bytes(model.graph, options, positions)

    if full:
        assert choose_context(room, size, 1 << 20, 40 * PAGE) == 40 * PAGE
        with pytest.raises(ResourceError, match=f"the largest context that fits is {40 * PAGE}"):
            choose_context(room, size, 1 << 20, 40 * PAGE + 1)
    else:
        assert choose_context(room, size, 1 << 20, 1 << 20) == 1 << 20


def test_drafts_and_one_page_more_can_always_be_forgotten() -> None:
    """Whatever window and whatever begin of a run."""
    for window in (1, 2, 63, 64, 65, 200):
        for start in range(0, 700, 7):
            cache = KVCache(window)
            cache.pages = pages(-(-start // PAGE))
            cache._drop(start)
            for length in range(max(0, start - REWIND), start + 1):
                fork = cache.fork(start)
                assert fork.rewind(length) == length
