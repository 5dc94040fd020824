"""Schemas of many clients: who waits for which, and what is remembered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import InputError
from edgeq.runtime import Model
from edgeq.runtime.answers import constraint
from edgeq.system.confinement import ConfinementLimits, LimitError, StallError

pytest.importorskip("llguidance")
pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")

from edgeq.runtime.batching.job import Busy  # noqa: E402
from edgeq.runtime.server.grammars import Grammars  # noqa: E402
from tests.runtime.server.serving import TEMPLATE, serving  # noqa: E402

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "def f("}]
KEYS = {hashlib.sha256(f"key-{name}".encode()).digest(): name for name in ("ann", "bob")}


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> Model:
    path = model_path("tiny-llama", bits=4, group_size=32)
    return Model.load(path, mode="a16", threads=1, threads_prefill=1, context=512, chat_template=TEMPLATE)


class Gate:
    """Stands before the trial of every grammar: none ends before `open` is set, and then each as if it took too long.

    entered   is set when one waits here;  tried: how many have come
    """

    def __init__(self) -> None:
        self.open, self.entered, self.tried = threading.Event(), threading.Event(), 0

    def confined(self, work: Callable[[], str], limits: ConfinementLimits) -> str:
        self.tried += 1
        self.entered.set()
        assert self.open.wait(60)
        raise LimitError("it takes more than 3 s of processor time")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate()
    monkeypatch.setattr(constraint, "confined", found.confined)
    yield found
    found.open.set()


def held(number: int) -> dict[str, Any]:
    schema = {"type": "string", "pattern": f"^(.*a){{{number}}}$"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": ASKED, "max_tokens": 4, "response_format": form}


def until(holds: Callable[[], bool]) -> None:
    """Wait for another thread; it is the test's time limit that ends a wait for nothing."""
    pause = threading.Event()
    while not holds():
        pause.wait(0.005)


@pytest.mark.exhaustive
def test_a_plain_request_does_not_wait_for_64_schemas(model: Model, gate: Gate) -> None:
    """Each of them used to be refused after 3 s, one after another, on the threads that read all requests."""
    with serving(model, queue=64) as served, ThreadPoolExecutor(64) as clients:
        waiting = [clients.submit(served.ask, CHAT, held(number)) for number in range(64)]
        until(lambda: served.server.grammars.waiting == 63)
        assert gate.entered.is_set() and not any(each.done() for each in waiting)
        plain = {"messages": ASKED, "max_tokens": 4}
        assert served.ask(CHAT, plain)[0] == served.ask("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 200
        assert gate.tried == 1 and not any(each.done() for each in waiting)
        gate.open.set()
        for each in waiting:
            status, _, found = each.result()
            assert status == 400 and found["error"]["code"] == "invalid_schema" and "too complex" in found["error"]["message"]
        assert gate.tried == 64 and served.idle()


def test_a_grammar_that_is_known_does_not_wait(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"messages": ASKED, "max_tokens": 60, "response_format": {"type": "json_object"}}
    with serving(model) as served:
        assert served.ask(CHAT, known)[0] == 200
        gate = Gate()
        monkeypatch.setattr(constraint, "confined", gate.confined)
        with ThreadPoolExecutor(1) as clients:
            waiting = clients.submit(served.ask, CHAT, held(70))
            assert gate.entered.wait(60)
            assert served.ask(CHAT, known)[0] == 200 and not waiting.done()
            gate.open.set()
            assert waiting.result()[0] == 400
        # Nor is one tried again that was refused, whoever asks.
        assert served.ask(CHAT, held(70))[0] == 400 and gate.tried == 1
        responses = {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"pattern": "^(.*a){70}"}}},
        }
        error = served.ask("/v1/responses", responses)[2]["error"]
        assert (error["code"], error["param"]) == ("invalid_schema", "text.format") and gate.tried == 2


def test_clients_take_turns(model: Model, gate: Gate) -> None:
    with serving(model, queue=8, keys=KEYS) as served, ThreadPoolExecutor(16) as clients:
        first = clients.submit(served.ask, CHAT, held(80), Authorization="Bearer key-ann")
        assert gate.entered.wait(60)
        many = [clients.submit(served.ask, CHAT, held(number), Authorization="Bearer key-ann") for number in range(81, 89)]
        until(lambda: served.server.grammars.waiting == 8)
        # The queue is full of those of one client: for the other there is a place, the next turn, and nobody else is served.
        other = clients.submit(served.ask, CHAT, held(90), Authorization="Bearer key-bob")
        until(lambda: any(each.done() for each in many))
        (busy,) = [each.result() for each in many if each.done()]
        assert busy[0] == 503 and busy[2]["error"]["code"] == "server_overloaded"
        status, headers, _ = served.ask(CHAT, held(91), Authorization="Bearer key-ann")
        assert status == 503 and int(headers["retry-after"]) >= 1
        gate.open.set()
        statuses = [each.result()[0] for each in (first, other, *many)]
        assert sorted(statuses) == [400] * 9 + [503] and other.result()[0] == 400


def test_a_client_that_leaves_gives_up_its_place(model: Model, gate: Gate) -> None:
    with serving(model) as served, ThreadPoolExecutor(1) as clients:
        first = clients.submit(served.ask, CHAT, held(100))
        assert gate.entered.wait(60)
        body = json.dumps(held(101)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with served.connect() as leaving:
            leaving.sendall(head.encode() + body)
            until(lambda: served.server.grammars.waiting == 1)
        until(lambda: served.server.grammars.waiting == 0)
        gate.open.set()
        assert first.result()[0] == 400 and gate.tried == 1 and served.idle()


def test_who_waits_for_too_long_is_told_so(model: Model, gate: Gate) -> None:
    with serving(model, queue_seconds=0.05) as served:
        status, headers, found = served.ask(CHAT, held(110))
        assert status == 503 and "grammar" in found["error"]["message"] and "retry-after" in headers
        gate.open.set()


def test_turns_go_around_the_clients() -> None:
    order, gate = list[str](), threading.Event()

    async def asking() -> None:
        grammars = Grammars(8, 60)

        def work(name: str) -> Callable[[], str]:
            def run() -> str:
                assert gate.wait(60)
                order.append(name)
                return name.upper()

            return run

        runs = [asyncio.ensure_future(grammars.run(name[0], work(name))) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
        await asyncio.sleep(0)
        assert grammars.waiting == 5
        runs[4].cancel()
        await asyncio.sleep(0)
        gate.set()
        found = await asyncio.gather(*runs, return_exceptions=True)
        assert found[0] == "A1" and isinstance(found[4], asyncio.CancelledError) and grammars.waiting == 0
        grammars.close()

    asyncio.run(asking())
    assert order == ["a1", "a2", "b1", "c2", "a3"]


def test_a_full_queue_refuses_who_has_most() -> None:
    gate = threading.Event()

    async def asking() -> None:
        grammars = Grammars(3, 60)
        runs = [asyncio.ensure_future(grammars.run(name, gate.wait)) for name in "aaaa"]
        await asyncio.sleep(0)
        assert grammars.waiting == 3
        with pytest.raises(Busy, match="3 grammars wait"):
            await grammars.run("a", gate.wait)
        runs += [asyncio.ensure_future(grammars.run(name, gate.wait)) for name in "bc"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert grammars.waiting == 3 and [run.done() for run in runs] == [False, False, True, True, False, False]
        gate.set()
        found = await asyncio.gather(*runs, return_exceptions=True)
        assert [isinstance(each, Busy) for each in found] == [False, False, True, True, False, False]
        grammars.close()

    asyncio.run(asking())


def test_what_was_refused_is_remembered_and_what_a_busy_machine_stopped_is_not(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, errors = list[int](), [StallError("it takes more than 30 s"), LimitError("it needs more than 512 MiB of memory")]

    def confined(work: Callable[[], str], limits: ConfinementLimits) -> str:
        tried.append(limits.nice)
        raise errors[len(tried) - 1]

    monkeypatch.setattr(constraint, "confined", confined)
    monkeypatch.setattr(constraint, "MAX_REFUSED", 2)
    grammar = constraint.of_lark('start: "refused"')
    with pytest.raises(InputError, match="could not be compiled"):
        model.constraints.compile(grammar)
    for _ in range(3):
        with pytest.raises(InputError, match="too complex: it needs more than 512 MiB"):
            model.constraints.compile(grammar)
    # Beside the texts that run, so less urgent than they are.
    assert tried == [10, 10]
    errors += [LimitError("a"), LimitError("b"), LimitError("c")]
    for name in ("a", "b", "refused"):
        with pytest.raises(InputError):
            model.constraints.compile(constraint.of_lark(f'start: "{name}"'))
    assert len(tried) == 5
    with pytest.raises(constraint.NotCompiledError):
        model.constraints.recall(constraint.of_lark('start: "a"'))


def test_a_stream_says_that_a_schema_is_refused_before_it_begins(model: Model, gate: Gate) -> None:
    gate.open.set()
    with serving(model) as served:
        assert served.ask(CHAT, held(120) | {"stream": True})[0] == 400
