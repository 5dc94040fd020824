"""Texts that come and go between runs: each is what it is alone, whoever waits, leaves or has to make room."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import EdgeqError, FormatError, InputError, ResourceError
from edgeq.pictures.prompt import PicturePlace, Prompt
from edgeq.runtime import Model, Sampling
from edgeq.runtime.answers.stopping import Ending
from edgeq.runtime.batching.job import Busy, Job, Ticket, Update
from edgeq.runtime.batching.prefix_tree import PrefixTree, key_of
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.request import Request
from edgeq.targets.capabilities import Draw, Largest
from edgeq.targets.rows import PAGE, Page, PagePart, Rows

WARM = Sampling(temperature=1.0, top_p=0.95, seed=3)
LONG = "".join(f"def f{i}(x{i}, path):\n    return {7 * i}\n" for i in range(8))


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    return Model.load(model_path("tiny-llama", bits=4, group_size=32), mode="a16", threads=1, context=256)


def job(
    model: Model, prompt: str, tokens: int = 12, sampling: Sampling = WARM, *, n: int = 1, who: str = "", **rest: Any
) -> Job:
    request = Request(max_tokens=tokens, ignore_eos=True, **rest)
    return Job(model.prompt(prompt), request, sampling, n, who, who)


def finished(scheduler: Scheduler, tickets: Sequence[Ticket]) -> dict[tuple[int, int], list[int]]:
    """(ticket, sample): tokens, after all steps."""
    found: dict[tuple[int, int], list[int]] = {}
    while scheduler.busy:
        for update in scheduler.step():
            assert not update.error, update.error
            found.setdefault((tickets.index(update.ticket), update.sample), []).extend(p.token for p in update.pieces)
    return found


def alone(model: Model, job: Job) -> list[int]:
    generation = model.generate(job.prompt, max_tokens=job.request.max_tokens, sampling=job.sampling, ignore_eos=True)
    generation.text()
    return generation.tokens


def jobs(model: Model) -> list[Job]:
    """Short and long prompts that share beginnings, greedy and drawn."""
    lengths = (20, len(LONG), len(LONG) - 3, 90)
    return [job(model, LONG[: lengths[k % 4]], 30 + 30 * (k % 3), Sampling(temperature=k % 2, seed=k)) for k in range(1, 7)]


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    """The tokens of each of `jobs` alone."""
    return [alone(model, each) for each in jobs(model)]


@pytest.mark.parametrize(
    ("shares", "pages", "draft"),
    [(False, None, "off"), (False, 6, "off"), (True, 6, "off"), (True, None, "lookup"), (False, 6, "lookup")],
)
def test_a_text_is_what_it_is_alone(
    model: Model, expected: list[list[int]], shares: bool, pages: int | None, draft: Any
) -> None:
    speculator = model.speculator(draft, 3 if draft != "off" else None)
    scheduler = Scheduler(model, 4, pages=pages, shares_prefixes=shares, step_seconds=1e-4, speculator=speculator)
    asked = {i: each for i, each in enumerate(jobs(model)) if draft == "off" or each.sampling.temperature == 0}
    found = finished(scheduler, [scheduler.submit(each) for each in asked.values()])
    assert found == {(i, 0): expected[which] for i, which in enumerate(asked)}
    if draft == "off":
        assert shares or (scheduler.totals.preemptions > 0) == (pages is not None)
    assert scheduler.running == scheduler.waiting == 0
    free, held, idle = scheduler.pages
    assert held == idle and (shares or held == 0) and (pages is None or free + held == pages)


@pytest.fixture
def finds_largest(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The model on a target that finds the largest logits of up to three rows; what it was asked for: rows, and how many."""
    program: Any = model.program
    asked = list[tuple[int, int]]()

    def run_largest(rows: Rows, count: int, mode: Any = None, weights: Any = None, *, ahead: Sequence[Draw] = ()) -> Largest:
        asked.append((len(rows), count))
        logits = program.run(rows, mode)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        return Largest(ids.astype(np.int32), np.take_along_axis(logits, ids, 1), np.isfinite(logits).all(1))

    for name, value in (("run_largest", run_largest), ("most_largest", 16), ("largest_rows", 3)):
        monkeypatch.setattr(program, name, value, raising=False)
    return asked


def test_what_the_device_finds_gives_the_same_tokens(model: Model, finds_largest: list[tuple[int, int]]) -> None:
    """Where each text that is decoded needs only the largest logits; else, and beside prompts, all of them are had."""
    greedy, narrow = Sampling(), Sampling(temperature=0.9, top_k=12, top_p=0.9, seed=4)
    wide, changed = Sampling(temperature=0.9, top_k=40, seed=4), Sampling(repeat_penalty=1.1)
    for drawn, count in (([greedy], 1), ([greedy, narrow, narrow], 12), ([greedy, wide], 0), ([narrow, changed], 0)):
        with_all = Scheduler(model, 4)
        model.program.most_largest = 0  # type: ignore[attr-defined]
        expected = finished(with_all, [with_all.submit(job(model, LONG[:30], sampling=each)) for each in drawn])
        model.program.most_largest = 16  # type: ignore[attr-defined]
        finds_largest.clear()
        scheduler = Scheduler(model, 4)
        found = finished(scheduler, [scheduler.submit(job(model, LONG[:30], sampling=each)) for each in drawn])
        assert list(found.values()) == list(expected.values())
        assert {each for _, each in finds_largest} == ({count} if count else set())
    scheduler = Scheduler(model, 4)
    finds_largest.clear()
    found = finished(scheduler, [scheduler.submit(job(model, LONG[:30], sampling=greedy)) for _ in range(4)])
    # Four rows are too many for it.
    assert len({tuple(tokens) for tokens in found.values()}) == 1 and not finds_largest


@pytest.mark.parametrize("draft", ["off", "lookup", "qspec"])
def test_a_text_that_cannot_go_on_ends_alone(model: Model, draft: Any) -> None:
    """With drafts several texts draw in one call."""
    scheduler = Scheduler(model, 2, speculator=model.speculator(draft, 3 if draft != "off" else None))
    sound, length = job(model, "def f(a, a, a, a", 40, Sampling()), len(model.prompt("x = x = x = ").tokens)

    def no_more(tokens: Sequence[int], logits: Any) -> Any:
        return logits if len(tokens) < length + 9 else np.full_like(logits, -np.inf)

    stuck = scheduler.submit(job(model, "x = x = x = ", 40, Sampling(), processors=(no_more,)))
    tickets, errors = [scheduler.submit(sound), stuck], list[tuple[Ticket, str]]()
    found: dict[Ticket, list[int]] = {ticket: [] for ticket in tickets}
    while scheduler.busy:
        for update in scheduler.step():
            found[update.ticket] += [piece.token for piece in update.pieces]
            errors += [(update.ticket, str(update.error))] if update.error else []
    assert [ticket for ticket, error in errors if "processor" in error] == [stuck] and len(errors) == 1
    assert found[tickets[0]] == alone(model, sound)
    assert found[stuck] == alone(model, job(model, "x = x = x = ", 9, Sampling()))
    assert scheduler.pages[1] == 0


def test_coming_going_and_leaving_at_any_moment_changes_no_text(model: Model, expected: list[list[int]]) -> None:
    """100 schedules are tried with the exhaustive tests; this is one."""
    schedules(model, expected, range(1))


@pytest.mark.exhaustive
def test_coming_going_and_leaving_at_any_moment_changes_no_text_in_100_schedules(
    model: Model, expected: list[list[int]]
) -> None:
    schedules(model, expected, range(1, 101))


def schedules(model: Model, expected: list[list[int]], seeds: range) -> None:
    asked = jobs(model)
    for seed in seeds:
        draw = random.Random(seed)
        scheduler = Scheduler(
            model, draw.randint(1, 5), pages=draw.choice([4, 5, 9]), shares_prefixes=draw.random() < 0.7, step_seconds=1e-4
        )
        tickets: dict[Ticket, int] = {}
        found: dict[Ticket, list[int]] = {}
        gone: set[Ticket] = set()
        for _ in range(60):
            if draw.random() < 0.3:
                which = draw.randrange(len(asked))
                tickets[scheduler.submit(asked[which])] = which
            if tickets and draw.random() < 0.1:
                gone.add(ticket := draw.choice(list(tickets)))
                scheduler.cancel(ticket)
            for update in scheduler.step():
                assert update.ticket not in gone
                found.setdefault(update.ticket, []).extend(piece.token for piece in update.pieces)
        while scheduler.busy:
            for update in scheduler.step():
                found.setdefault(update.ticket, []).extend(piece.token for piece in update.pieces)
        for ticket, which in tickets.items():
            if ticket not in gone:
                assert found[ticket] == expected[which], (seed, which)
        assert scheduler.pages[1] == scheduler.pages[2]


def test_a_prefix_is_run_once_and_not_shown_to_another_owner(model: Model) -> None:
    scheduler = Scheduler(model, 2, shares_prefixes=True)
    first, again, other = (scheduler_run(scheduler, job(model, LONG, who=who)) for who in ("ann", "ann", "bob"))
    tokens = len(model.text.encode(LONG))
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, (tokens - 1) // PAGE * PAGE, 0)
    assert again.cached_tokens > 0


def scheduler_run(scheduler: Scheduler, job: Job) -> Ticket:
    ticket = scheduler.submit(job)
    finished(scheduler, [ticket])
    return ticket


def test_an_answer_is_found_by_the_turn_that_follows_it(model: Model) -> None:
    scheduler = Scheduler(model, 1, shares_prefixes=True)
    asked = job(model, LONG, 80)
    tokens = finished(scheduler, [scheduler.submit(asked)])[0, 0]
    whole = [*asked.prompt.tokens, *tokens]
    turn = Job(Prompt([*whole, 5, 6]), asked.request, WARM)
    assert scheduler_run(scheduler, turn).cached_tokens == (len(whole) - 1) // PAGE * PAGE


@pytest.mark.parametrize("pages", [None, 4])
@pytest.mark.parametrize("seats", [1, 2, 6])
def test_texts_of_one_prompt_are_those_of_their_seeds(model: Model, seats: int, pages: int | None) -> None:
    wide = Scheduler(model, 6)
    asked = job(model, LONG, 30, n=4)
    expected = finished(wide, [wide.submit(asked)])
    assert wide.totals.prompt_tokens == len(asked.prompt.tokens) and len(expected) == 4
    scheduler = Scheduler(model, seats, pages=pages)
    assert finished(scheduler, [scheduler.submit(asked)]) == expected and scheduler.pages[1] == 0


def test_clients_have_turns(model: Model) -> None:
    scheduler = Scheduler(model, 1)
    asked = [job(model, "import ", 2, who=who) for who in "aaaabbc"]
    tickets = [scheduler.submit(each) for each in asked]
    order: list[str] = []
    while scheduler.busy:
        order += [update.ticket.job.client for update in scheduler.step() if update.reason]
    assert "".join(order) == "abcabaa" and len(tickets) == 7


def test_a_short_prompt_does_not_wait_for_a_long_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the long one wait for ever: it gets every second chunk."""
    # As on a machine that reads few tokens in the time of a step, whatever runs beside this test.
    monkeypatch.setattr(model.prefill_rate, "rows", lambda seconds: model.program.tile)
    scheduler = Scheduler(model, 4)
    decoding = scheduler.submit(job(model, "import ", 200))
    steps_until(scheduler, decoding)
    long = scheduler.submit(job(model, LONG, 3))
    scheduler.step()
    short = scheduler.submit(job(model, "import ", 3))
    assert steps_until(scheduler, short) <= 4
    assert long.first is None
    assert steps_until(scheduler, long) < 60


def steps_until(scheduler: Scheduler, ticket: Ticket) -> int:
    for count in range(1, 1000):
        if any(update.ticket is ticket for update in scheduler.step()):
            return count
    raise AssertionError("it never came")


def test_cancelled_texts_end_before_the_next_step(model: Model) -> None:
    scheduler = Scheduler(model, 2, queue=5)
    waiting, running = (job(model, LONG, 50, n=2), job(model, LONG, 50))
    first = scheduler.submit(running)
    second = scheduler.submit(waiting)
    scheduler.step()
    assert scheduler.pages[1] > 0
    scheduler.cancel(first)
    scheduler.cancel(second)
    assert scheduler.step() == [] and not scheduler.busy and scheduler.pages[1] == 0
    # One that has ended, or was cancelled before, is nobody else's.
    scheduler.cancel(first)
    assert scheduler.step() == [] and scheduler.waiting == 0


def test_the_queue_has_an_end(model: Model) -> None:
    scheduler = Scheduler(model, 1, queue=2)
    scheduler.submit(job(model, "x", n=2))
    with pytest.raises(Busy):
        scheduler.submit(job(model, "x", n=2))
    scheduler.submit(job(model, "x"))
    with pytest.raises(InputError, match="context"):
        scheduler.submit(job(model, LONG * 3))
    with pytest.raises(InputError, match="load a shorter one"):
        Scheduler(model, 1, pages=3)


def test_an_error_of_one_text_ends_that_text(model: Model) -> None:
    def wrong(tokens: Sequence[int], logits: Any) -> Any:
        return logits[:5]

    scheduler = Scheduler(model, 2)
    bad, good = scheduler.submit(job(model, "import ", processors=[wrong])), scheduler.submit(job(model, "import "))
    found: list[Update] = []
    while scheduler.busy:
        found += scheduler.step()
    assert [type(u.error) for u in found if u.ticket is bad] == [InputError] and issubclass(InputError, EdgeqError)
    assert [u.reason for u in found if u.ticket is good][-1] == "length" and scheduler.pages[1] == 0


def test_a_text_beside_one_that_makes_room_drafts_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages were made for one token: drafts would reach into one that nobody made or counted."""
    pattern = [5, 6, 7] * 80

    def repeats(tokens: Sequence[int], logits: Any) -> Any:
        only = np.full_like(logits, -np.inf)
        only[pattern[len(tokens)]] = 0
        return only

    scheduler = Scheduler(model, 2, speculator=model.speculator("lookup", 7), step_seconds=1e-4)
    request = Request(max_tokens=100, ignore_eos=True, processors=(repeats,))
    ticket = scheduler.submit(Job(Prompt(pattern[:59]), request, Sampling()))
    steps_until(scheduler, ticket)
    scheduler.submit(job(model, LONG))
    make = model.program.new_page

    def scarce() -> Page:
        raise ResourceError("no more memory")

    monkeypatch.setattr(model.program, "new_page", scarce)
    updates = scheduler.step()
    monkeypatch.setattr(model.program, "new_page", make)
    assert [len(update.pieces) for update in updates] == [1] and scheduler.totals.preemptions == 1


def test_a_tokenizer_that_fails_on_one_text_ends_that_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(model, 2)
    bad, good = scheduler.submit(job(model, "import ")), scheduler.submit(job(model, "import "))
    scheduler.step()
    failing, push = next(text.ending for text in scheduler._texts if text.ticket is bad), Ending.push

    def wrong(ending: Ending, token: int, full: bool) -> str:
        if ending is failing:
            raise FormatError("the file's tokenizer does not work")
        return push(ending, token, full)

    monkeypatch.setattr(Ending, "push", wrong)
    found: list[Update] = []
    while scheduler.busy:
        found += scheduler.step()
    assert [type(u.error) for u in found if u.ticket is bad] == [FormatError]
    assert [u.reason for u in found if u.ticket is good][-1] == "length" and scheduler.pages[1] == 0


def test_pictures_are_told_apart_by_their_digests_and_places() -> None:
    tokens = list(range(70))
    keys = {
        key_of(tokens, places, start)
        for start in (0, 64)
        for places in (
            (),
            (PicturePlace(3, (1, 8, 8), b"a", 64),),
            (PicturePlace(3, (1, 8, 8), b"b", 64),),
            (PicturePlace(4, (1, 8, 8), b"a", 64),),
        )
    }
    assert len(keys) == 8


def test_the_tree_drops_what_was_unused_longest_from_its_end() -> None:
    tree, pages = PrefixTree(), [Page(PagePart(), PagePart()) for _ in range(4)]
    old, new = list[Any](), list[Any]()
    tree.extend("", old, list(range(2 * PAGE)), (), pages)
    tree.extend("", new, [*range(PAGE), *range(500, 500 + PAGE)], (), pages)
    assert (tree.pages, tree.idle) == (3, 0) and tree.evict(3) == 0
    tree.release(old)
    tree.release(new)
    assert tree.evict(1) == 1
    prompt = Prompt([*range(2 * PAGE), 1])
    assert len(path := tree.find("", prompt)) == 1
    tree.release(path)
    assert tree.evict(9) == 2 and (tree.pages, tree.idle) == (0, 0)


def test_a_long_text_is_dropped_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, old, new = PrefixTree(), list[Any](), list[Any]()
    tree.extend("", old, list(range(30 * PAGE)), (), [Page(PagePart(), PagePart()) for _ in range(30)])
    tree.release(old)
    tree.extend("", new, [5] * PAGE, (), [Page(PagePart(), PagePart())])
    tree.release(new)
    nodes, passes = tree._nodes, list[int]()
    monkeypatch.setattr(tree, "_nodes", lambda: [passes.append(1), nodes()][1])
    assert tree.evict(30) == 30 and len(passes) == 1 and (tree.pages, tree.idle) == (1, 1)
    assert len(tree.find("", Prompt([5] * PAGE + [1]))) == 1
