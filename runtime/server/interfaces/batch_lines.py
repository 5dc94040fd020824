"""Requests that come as lines of a file in the shape of OpenAI's batches, and the record that is written of each.

A record depends on its line, on where it is in the file and on the model alone: not on what ran beside it, nor on the clock, so
that a run that was ended and begun again writes the same file.  Hence `created` is 0, a request without a seed has one that
follows from its line, and how much of a prompt was found in the cache is not told.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from edgeq.errors import DeviceError
from edgeq.runtime.batching.job import Job, Ticket
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.model import Model
from edgeq.runtime.server.errors import ApiError, of_exception, unsupported
from edgeq.runtime.server.interfaces.answers import RequestAnswer, Shape
from edgeq.runtime.server.interfaces.chat_request import Asker, chat_job, compiled, completion_jobs
from edgeq.runtime.server.interfaces.fields import Chat, Completion, decoded, fields
from edgeq.runtime.server.interfaces.responses import Responses, responses_job
from edgeq.runtime.server.interfaces.responses_answer import ResponsesAnswer
from edgeq.runtime.server.settings import Settings

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MAX_ID_CHARACTERS = 256
LINES_AHEAD = 2
"""Lines that are read beside those that run, as a multiple of the seats: templates and pictures take their time."""


class BatchLine(NamedTuple):
    """A line of the file.

    id      of its record: a digest of what the record depends on
    wrong   what is wrong with it beside others, such as a name that another line has; empty: nothing
    """

    id: str
    data: bytes
    wrong: str = ""


class ResultLine(NamedTuple):
    """What is written of a line: `failed`: it has no answer."""

    id: str
    data: bytes
    failed: bool


class ResultId(msgspec.Struct):
    """What is read of a record that was written before."""

    id: str
    response: dict[str, Any] | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.get("status_code") != 200

    @property
    def may_pass(self) -> bool:
        """Whether the line may have an answer when it is asked again: it failed by no mistake of its own."""
        status = (self.response or {}).get("status_code")
        return not isinstance(status, int) or status >= 500


def record_id(run: bytes, number: int, data: bytes) -> str:
    """The id of the record of a line; `run`: digest of the model and of what else the answers depend on."""
    return f"batch_req_{hashlib.blake2b(run + number.to_bytes(8, 'little') + data, digest_size=16).hexdigest()}"


def custom_id_of(data: bytes) -> str | None:
    """The name that the line has for itself; None: it cannot be read."""
    try:
        found = decoded(data).get("custom_id")
    except ApiError:
        return None
    return found if isinstance(found, str) and 0 < len(found) <= MAX_ID_CHARACTERS else None


@dataclass
class _Asked:
    """A line that can be answered: its fields are gone, which may have megabytes."""

    shape: Shape
    jobs: list[Job]
    responses: Responses | None = None


@dataclass
class _Running:
    line: BatchLine
    answer: RequestAnswer
    responses_answer: ResponsesAnswer | None
    tickets: dict[Ticket, int]
    left: int


class Lines:
    """Answers lines with one model, several at once."""

    def __init__(self, model: Model, settings: Settings, cache_pages: int | None) -> None:
        self._model, self._settings = model, settings
        self.scheduler = Scheduler(model, settings.seats, pages=cache_pages, shares_prefixes=True)
        self._running: dict[Ticket, _Running] = {}

    def records(self, lines: Iterable[BatchLine]) -> Iterator[ResultLine]:
        """The record of each line, as they are finished.  DeviceError: the model has failed."""
        source, seats, more = iter(lines), self._settings.seats, True
        ahead = deque[tuple[BatchLine, Future[_Asked]]]()
        with ThreadPoolExecutor(1, "edgeq-reader") as pool:
            while more or ahead or self.scheduler.busy:
                while more and len(ahead) < LINES_AHEAD * seats:
                    if next_line := next(source, None):
                        ahead.append((next_line, pool.submit(self._asked, next_line)))
                    else:
                        more = False
                while ahead and len(self._running) < seats and (ahead[0][1].done() or not self.scheduler.busy):
                    line, future = ahead.popleft()
                    try:
                        self._begin(line, future.result())
                    except Exception as error:
                        yield refused(line, error)
                yield from self._step()

    def _asked(self, line: BatchLine) -> _Asked:
        """ApiError and other errors of the project: the line cannot be answered."""
        if line.wrong:
            raise ApiError(400, "invalid_line", line.wrong)
        if len(line.data) > self._settings.most_body:
            raise ApiError(400, "body_too_large", f"the line has more than {self._settings.most_body} bytes")
        found = decoded(line.data)
        if custom_id_of(line.data) is None:
            raise ApiError(400, "invalid_line", f"custom_id is a string of 1 to {MAX_ID_CHARACTERS} characters", "custom_id")
        if found.get("method") != "POST":
            raise ApiError(400, "invalid_line", "method is POST", "method")
        body = found.get("body")
        if not isinstance(body, dict):
            raise ApiError(400, "invalid_line", "body is the object of a request", "body")
        if body.get("stream"):
            raise unsupported("stream", "a record has a whole answer")
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        seed = int(line.id[-15:], 16)
        if found.get("url") == RESPONSES:
            responses, _ = fields(Responses, body)
            asked = responses_job(self._model, self._settings, responses, self._asker(responses.model))
            seeded = self._compiled(replace(asked, sampling=replace(asked.sampling, seed=seed)))
            return _Asked("chat", [seeded], msgspec.structs.replace(responses, input="", instructions=None, text=None))
        if body.get("seed") is None:
            body["seed"] = seed
        if found.get("url") == CHAT:
            chat, _ = fields(Chat, body)
            who = self._asker(chat.model)
            return _Asked("chat", [self._compiled(chat_job(self._model, self._settings, chat, who))])
        if found.get("url") == COMPLETION:
            completion, _ = fields(Completion, body)
            who = self._asker(completion.model)
            return _Asked("completion", completion_jobs(self._model, self._settings, completion, who))
        raise ApiError(400, "invalid_line", f"url is {CHAT}, {COMPLETION} or {RESPONSES}", "url")

    def _compiled(self, job: Job) -> Job:
        return compiled(self._model, job, self._model.constraints.compile) if job.request.waits else job

    def _asker(self, name: str | None) -> Asker:
        """ApiError: a model that is not here."""
        if name is not None and name not in self._settings.models:
            known = ", ".join(self._settings.models)
            raise ApiError(404, "model_not_found", f"the model {name[:100]!r} is not here; there is {known}", "model")
        return Asker("", "", self._settings.models.get(name or ""))

    def _begin(self, line: BatchLine, asked: _Asked) -> None:
        tickets, first = dict[Ticket, int](), 0
        for job in asked.jobs:
            tickets[self.scheduler.submit(job)] = first
            first += job.n
        stops = asked.jobs[0].request.stops(self._model.text)
        options = self._model.program.options
        model = asked.jobs[0].model
        fingerprint = f"edgeq-{(model or self._model).file.identity[:8]}-{self._model.target}-{options.mode}"
        title = self._settings.title(model)
        answer = RequestAnswer(asked.shape, title, fingerprint, self._model.text, list(tickets), stops=stops, keeps=True)
        responses_answer = ResponsesAnswer(asked.responses, answer) if asked.responses else None
        running = _Running(line, answer, responses_answer, tickets, first)
        self._running |= dict.fromkeys(tickets, running)

    def _step(self) -> Iterator[ResultLine]:
        for update in self.scheduler.step():
            running = self._running.get(update.ticket)
            if running is None:
                continue
            if update.error:
                if isinstance(update.error, DeviceError):
                    raise update.error
                self._drop(running)
                yield refused(running.line, update.error)
                continue
            running.answer.take(running.tickets[update.ticket], update)
            running.left -= update.reason is not None
            if not running.left:
                self._drop(running)
                if running.responses_answer:
                    yield told_of(running.line, running.responses_answer.whole())
                else:
                    yield answered(running.line, running.answer.whole())

    def _drop(self, running: _Running) -> None:
        for ticket in running.tickets:
            self.scheduler.cancel(ticket)
            del self._running[ticket]


def answered(line: BatchLine, whole: dict[str, Any]) -> ResultLine:
    """The record of an answer."""
    usage = {**whole["usage"], "prompt_tokens_details": {"cached_tokens": 0}}
    prefix = whole["id"].partition("-")[0]
    body = {name: value for name, value in whole.items() if name != "edgeq"}
    body |= {"id": f"{prefix}-{line.id[-24:]}", "created": 0, "usage": usage}
    return _recorded(line, {"status_code": 200, "request_id": line.id, "body": body}, False)


def told_of(line: BatchLine, whole: dict[str, Any]) -> ResultLine:
    """The record of an answer in the shape of responses."""
    usage = {**whole["usage"], "input_tokens_details": {"cached_tokens": 0}}
    output = [
        {**item, "id": f"{item['id'].partition('_')[0]}_{line.id[-24:]}{index}"} for index, item in enumerate(whole["output"])
    ]
    body = whole | {"id": f"resp_{line.id[-24:]}", "created_at": 0, "usage": usage, "output": output}
    return _recorded(line, {"status_code": 200, "request_id": line.id, "body": body}, False)


def refused(line: BatchLine, error: Exception) -> ResultLine:
    """The record of a line that has no answer."""
    found = of_exception(error)
    return _recorded(line, {"status_code": found.status, "request_id": line.id, "body": found.body}, True)


def _recorded(line: BatchLine, response: dict[str, Any], failed: bool) -> ResultLine:
    record = {"id": line.id, "custom_id": custom_id_of(line.data), "response": response, "error": None}
    return ResultLine(line.id, msgspec.json.encode(record) + b"\n", failed)
