"""The application: routes, and what each does with a request."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from edgeq.runtime.batching.base_scheduler import BaseScheduler
from edgeq.runtime.batching.job import Busy, Job, Update
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.model import Model
from edgeq.runtime.server.errors import ApiError, of_exception
from edgeq.runtime.server.fields import Chat, Completion, GenerationFields, decoded, fields, named
from edgeq.runtime.server.gauges import gauges_of, tokens_of
from edgeq.runtime.server.grammars import Grammars
from edgeq.runtime.server.guard import Guard
from edgeq.runtime.server.interfaces.answers import RequestAnswer, Shape
from edgeq.runtime.server.interfaces.chat_request import Asker, chat_job, compiled, completion_jobs
from edgeq.runtime.server.interfaces.embeddings import Embedding, Embeddings, refuse_texts, refuse_vectors, scheduler_of
from edgeq.runtime.server.interfaces.messages import CountFields, Messages, message_job, prompt_of, use_of
from edgeq.runtime.server.interfaces.messages_answer import MessagesAnswer
from edgeq.runtime.server.interfaces.responses import Responses, renamed, responses_job
from edgeq.runtime.server.interfaces.responses_answer import ResponsesAnswer
from edgeq.runtime.server.metrics import Metrics
from edgeq.runtime.server.owner import Owner, TicketUpdates
from edgeq.runtime.server.replies import closed_with, ignored, json_of, no_route, while_connected
from edgeq.runtime.server.settings import Settings, speculator_of
from edgeq.runtime.server.watch import watch
from edgeq.runtime.stats import Speculation
from edgeq.version import __version__

BODY_SECONDS = 30
BODY_RATE = 100_000
"""Bytes per second that a body has to come with beside the 30 seconds."""
MAX_BODIES = 8
"""As many of the largest are held at once, however many clients send one; what is read from them takes up to 30 times as much,
so that only as many are read as the pool has threads."""
SMALL_BODY = 64 << 10
"""Bytes of one that there is always room for."""
STREAM = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_log = logging.getLogger("edgeq.server")
T = TypeVar("T")
F = TypeVar("F", bound=CountFields | GenerationFields | Responses | Embeddings)
Handler = Callable[[Request], Awaitable[Response]]


class TextRequest:
    """What is left of a request for texts once it has been read: not its fields, which may have megabytes."""

    def __init__(self, fields: Chat | Completion, jobs: list[Job]) -> None:
        self.jobs, self.stream = jobs, bool(fields.stream)
        self.usage = bool(fields.stream_options and fields.stream_options.include_usage)


class Server:
    """What the routes share.  `begin` is called within the event loop, before the first request."""

    def __init__(self, model: Model, settings: Settings, cache_pages: int | None, on_failure: Callable[[], None]) -> None:
        self.model, self.settings, self.metrics = model, settings, Metrics()
        self.store: PromptStore | None = None
        self._drafts = Speculation()
        if model.config.pooling:
            self.scheduler: BaseScheduler = scheduler_of(model, settings, cache_pages)
        else:
            folder, most = settings.prompt_cache, settings.prompt_cache_bytes
            self.store = model.prompt_store(folder, most) if folder and settings.share_prefixes else None
            speculator = speculator_of(model, settings)
            self._drafts = speculator.statistics
            self.scheduler = Scheduler(
                model, settings.seats, queue=settings.queue, step_seconds=settings.step_seconds, pages=cache_pages,
                shares_prefixes=settings.share_prefixes, speculator=speculator, store=self.store,
            )  # fmt: skip
        self._on_failure, self._created = on_failure, int(time.time())
        self._pool, self.grammars = ThreadPoolExecutor(2, "edgeq-reader"), Grammars(settings.queue)
        self._body_bytes = 0  # of all bodies that are not read yet
        options = model.program.options
        self.fingerprint = f"edgeq-{__version__}-{model.file.identity[:8]}-{model.target}-{options.mode}"

    def begin(self) -> None:
        self.owner = Owner(self.scheduler, self.settings, self.metrics, self._on_failure)
        self.metrics.watch(
            lambda: tokens_of(self.scheduler, self._drafts), lambda: gauges_of(self.scheduler, self.owner, self.store)
        )
        self._watching = asyncio.ensure_future(watch(self.model.file, self.owner.fail))

    def close(self) -> None:
        self._watching.cancel()
        self.owner.close()
        if self.store:
            self.store.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    def app(self) -> ASGIApp:
        api: dict[str, tuple[Handler, list[str]]] = {
            "/chat/completions": (self._continuing(self._chat), ["POST"]),
            "/completions": (self._continuing(self._completions), ["POST"]),
            "/responses": (self._continuing(self._responses), ["POST"]),
            "/embeddings": (self._embeddings, ["POST"]),
            "/messages": (self._continuing(self._messages), ["POST"]),
            "/messages/count_tokens": (self._continuing(self._count_tokens), ["POST"]),
            "/models": (self._models, ["GET"]),
            "/models/{name:path}": (self._one_model, ["GET"]),
        }
        routes = {prefix + path: route for path, route in api.items() for prefix in ("/v1", "")}
        routes |= {"/health": (self._health, ["GET"]), "/metrics": (self._metrics, ["GET"])}
        routes |= {"/api/{rest:path}": (self._ollama, ["GET", "POST", "PUT", "DELETE"])}
        if self.settings.page and not self.model.config.pooling:
            routes["/"] = (self._page, ["GET"])
        named = [Route(path, self._route(path, handler), methods=methods) for path, (handler, methods) in routes.items()]
        return Guard(Starlette(routes=named, exception_handlers={HTTPException: no_route}), self.settings, self.metrics)

    def _continuing(self, handler: Handler) -> Handler:
        """A handler that models have which continue texts."""

        async def run(request: Request) -> Response:
            refuse_vectors(self.model)
            return await handler(request)

        return run

    def _route(self, path: str, handler: Handler) -> Handler:
        async def run(request: Request) -> Response:
            request.scope["state"]["endpoint"] = path
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return self.told(error).response()

        return run

    def told(self, error: Exception) -> ApiError:
        """What a client is told; the log has what it must not be told."""
        found = of_exception(error, self.owner.retry_after)
        # Where the file lies is no business of clients.
        path = self.model.file.path
        found.message = found.message.replace(f"{path}: ", "").replace(str(path), path.name)
        if found.status == 500:
            # Where, and not what: a message may quote what a client sent.
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            _log.error("%s in %s", type(error).__name__, ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames))
        return found

    async def read(self, request: Request, kind: type[F], make: Callable[[F, Asker], T]) -> T:
        """What `make` makes of the fields of a request and who asks, on a thread of the pool.

        ApiError: not JSON, too large, too slow, or a field that cannot be had.
        """
        body, who = bytearray(), Asker(request.scope["state"]["client"], request.scope["state"]["owner"])

        def made() -> T:
            asked, unknown = fields(kind, decoded(body))
            self.check_model(asked.model)
            self.metrics.ignored.inc(len(unknown))
            if unknown and self.settings.strict:
                raise ApiError(400, "unknown_parameter", f"{unknown[0][:40]!r} is not known", unknown[0][:40])
            request.state.ignored = named(unknown)
            return make(asked, replace(who, model=self.settings.models.get(asked.model or "")))

        try:
            await self._receive(request, body)
            return await asyncio.get_running_loop().run_in_executor(self._pool, made)
        finally:
            self._body_bytes -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        declared, most = request.headers.get("content-length", ""), self.settings.most_body
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "unsupported_media_type", 'the body is JSON: curl -H "content-type: application/json"')
        too_large = ApiError(413, "body_too_large", f"the body has more than {most} bytes")
        if declared.isdigit() and (len(declared) > 15 or int(declared) > most):
            raise too_large

        headers = {"retry-after": str(self.owner.retry_after), "connection": "close"}
        full = ApiError(503, "server_overloaded", "too many large requests are being received", headers=headers)

        async def read() -> None:
            async for part in request.stream():
                body.extend(part)
                self._body_bytes += len(part)
                if len(body) > most:
                    raise too_large
                if len(body) > SMALL_BODY and self._body_bytes > MAX_BODIES * most:
                    raise full

        try:
            await asyncio.wait_for(read(), BODY_SECONDS + (int(declared) if declared.isdigit() else most) / BODY_RATE)
        except asyncio.TimeoutError:
            raise ApiError(408, "body_too_slow", "the body did not come in time") from None

    async def compiled(self, request: Request, job: Job) -> Job:
        """The job with its grammar compiled.  Busy, ApiError: there is no time for it, or it cannot be used."""
        if not job.request.waits:
            return job
        turn = self.grammars.run(job.client, lambda: compiled(self.model, job, self.model.constraints.compile))
        try:
            return await asyncio.wait_for(while_connected(request, turn), self.settings.queue_seconds)
        except asyncio.TimeoutError:
            raise Busy("the grammar waited for too long to be compiled") from None

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.models:
            known = ", ".join(self.settings.models)
            raise ApiError(404, "model_not_found", f"the model {name[:100]!r} is not here; there is {known}", "model")

    async def _chat(self, request: Request) -> Response:
        def made(asked: Chat, who: Asker) -> TextRequest:
            return TextRequest(asked, [chat_job(self.model, self.settings, asked, who)])

        asked = await self.read(request, Chat, made)
        asked.jobs = [await self.compiled(request, job) for job in asked.jobs]
        return await self._answer(request, "chat", asked)

    async def _completions(self, request: Request) -> Response:
        def made(asked: Completion, who: Asker) -> TextRequest:
            return TextRequest(asked, completion_jobs(self.model, self.settings, asked, who))

        return await self._answer(request, "completion", await self.read(request, Completion, made))

    async def _messages(self, request: Request) -> Response:
        def made(asked: Messages, who: Asker) -> tuple[bool, Job]:
            return bool(asked.stream), message_job(self.model, self.settings, asked, who)

        stream, job = await self.read(request, Messages, made)
        job = await self.compiled(request, job)
        (answering,) = answerings = self.submit([job])
        reply, updates = MessagesAnswer(self.settings.title(job.model), job, self.model.text), self.merged(answerings)
        if stream:
            events = reply.events(updates, lambda: answering.ticket.cached_tokens, self.told)
            return StreamingResponse(closed_with(events, updates), 200, STREAM)
        await self.collected(request, updates, lambda first, update: reply.take(update))
        return json_of(reply.whole(answering.ticket.cached_tokens))

    async def _count_tokens(self, request: Request) -> Response:
        def made(asked: CountFields, who: Asker) -> int:
            return len(prompt_of(self.model, asked, use_of(self.model, asked)).tokens)

        return json_of({"input_tokens": await self.read(request, CountFields, made)})

    async def _responses(self, request: Request) -> Response:
        def made(asked: Responses, who: Asker) -> tuple[Responses, Job]:
            job = responses_job(self.model, self.settings, asked, who)
            # What is left of it until the answer is given: not its text, which may have megabytes.
            return msgspec.structs.replace(asked, input="", instructions=None, text=None), job

        asked, job = await self.read(request, Responses, made)
        try:
            job = await self.compiled(request, job)
        except ApiError as error:
            raise renamed(error) from None
        answerings, text, title = self.submit([job]), self.model.text, self.settings.title(job.model)
        tickets = [each.ticket for each in answerings]
        answer = RequestAnswer("chat", title, self.fingerprint, text, tickets, stops=job.request.stops(text), keeps=True)
        shown, updates = ResponsesAnswer(asked, answer), self.merged(answerings)
        headers = ignored(request)
        if asked.stream:
            return StreamingResponse(closed_with(shown.events(updates, self.told), updates), 200, STREAM | headers)
        await self.collected(request, updates, lambda first, update: answer.take(first, update))
        return json_of(shown.whole(), headers)

    async def _answer(self, request: Request, shape: Shape, asked: TextRequest) -> Response:
        answerings = self.submit(asked.jobs)
        stops = asked.jobs[0].request.stops(self.model.text)
        tickets = [each.ticket for each in answerings]
        title = self.settings.title(asked.jobs[0].model)
        answer = RequestAnswer(shape, title, self.fingerprint, self.model.text, tickets, stops=stops, keeps=not asked.stream)
        headers = ignored(request)
        updates = self.merged(answerings)
        if asked.stream:
            return StreamingResponse(
                closed_with(answer.events(updates, asked.usage, self.told), updates), 200, STREAM | headers
            )
        await self.collected(request, updates, lambda first, update: answer.take(first, update))
        return json_of(answer.whole(), headers)

    def submit(self, jobs: list[Job]) -> list[TicketUpdates]:
        """All of them, or none.  Busy: the queue is full."""
        found = list[TicketUpdates]()
        try:
            for job in jobs:
                found.append(self.owner.submit(job))
        except Exception:
            for each in found:
                self.owner.cancel(each)
            raise
        return found

    async def merged(self, answerings: list[TicketUpdates]) -> AsyncGenerator[tuple[int, Update] | None, None]:
        """The updates of several jobs with the number of the first text of each; None where nothing came for 10 s."""
        first = 0
        try:
            for each in answerings:
                async with aclosing(self.owner.updates(each)) as updates:
                    async for update in updates:
                        if update and update.error:
                            if update.pieces:
                                # Those of earlier steps, which come together with it.
                                yield first, update
                            raise update.error
                        yield (first, update) if update else None
                first += each.ticket.job.n
        finally:
            for each in answerings:
                self.owner.cancel(each)

    async def collected(
        self, request: Request, updates: AsyncGenerator[tuple[int, Update] | None, None], take: Callable[[int, Update], Any]
    ) -> None:
        """Take all updates.  ClientDisconnect: the client has left, and the work with it."""

        async def run() -> None:
            async for found in updates:
                if found:
                    take(*found)

        try:
            await while_connected(request, run())
        finally:
            await updates.aclose()

    async def _models(self, request: Request) -> Response:
        return json_of({"object": "list", "data": [self._described(name) for name in self.settings.models]})

    async def _one_model(self, request: Request) -> Response:
        self.check_model(request.path_params["name"])
        return json_of(self._described(request.path_params["name"]))

    def _described(self, name: str) -> dict[str, Any]:
        seen = ["text", "image"] if self.model.config.vision else ["text"]
        fixed = {"object": "model", "created": self._created, "owned_by": "edgeq"}
        return {"id": name, **fixed, "context_length": self.model.context, "input_modalities": seen}

    async def _health(self, request: Request) -> Response:
        return json_of({"status": self.owner.state}, status=200 if self.owner.state == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _page(self, request: Request) -> Response:
        return Response(PAGE.read_bytes(), headers=PAGE_HEADERS, media_type="text/html; charset=utf-8")

    async def _embeddings(self, request: Request) -> Response:
        refuse_texts(self.model)
        asked = await self.read(request, Embeddings, lambda fields, who: Embedding(self.model, fields, who))
        updates, title = self.merged(self.submit(asked.jobs)), self.settings.title(None)
        await self.collected(request, updates, lambda first, update: asked.take(first, update.vector))
        body = await asyncio.get_running_loop().run_in_executor(self._pool, asked.body, title)
        return Response(body, 200, ignored(request), "application/json")

    async def _ollama(self, request: Request) -> Response:
        raise ApiError(
            404, "unsupported_endpoint", "Ollama's interface is not here; clients of it take /v1 as an OpenAI server too"
        )
