"""The application: routes, and what each does with a request."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edgeq.runtime.batching.base_scheduler import BaseScheduler
from edgeq.runtime.batching.job import Job, Ticket
from edgeq.runtime.batching.prompt_store import PromptStore
from edgeq.runtime.batching.scheduler import Scheduler
from edgeq.runtime.model import Model
from edgeq.runtime.server.bodies import Bodies
from edgeq.runtime.server.errors import ApiError, of_exception
from edgeq.runtime.server.gauges import gauges_of, tokens_of
from edgeq.runtime.server.grammars import Grammars
from edgeq.runtime.server.guard import Guard
from edgeq.runtime.server.interfaces.answers import RequestAnswer, Shape
from edgeq.runtime.server.interfaces.chat_request import Asker, chat_job, completion_jobs
from edgeq.runtime.server.interfaces.embeddings import Embedding, Embeddings, refuse_texts, refuse_vectors, scheduler_of
from edgeq.runtime.server.interfaces.fields import Chat, Completion
from edgeq.runtime.server.interfaces.messages import CountFields, Messages, message_job, prompt_of, use_of
from edgeq.runtime.server.interfaces.messages_answer import MessagesAnswer
from edgeq.runtime.server.interfaces.rerank import Ranking, Rerank, refuse_rankings
from edgeq.runtime.server.interfaces.responses import Responses, renamed, responses_job
from edgeq.runtime.server.interfaces.responses_answer import ResponsesAnswer
from edgeq.runtime.server.metrics import Metrics
from edgeq.runtime.server.owner import Owner
from edgeq.runtime.server.replies import collected, ignored, json_of, no_route, respond
from edgeq.runtime.server.settings import Settings, speculator_of
from edgeq.runtime.server.watch import watch
from edgeq.runtime.stats import Speculation
from edgeq.version import __version__

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_log = logging.getLogger("edgeq.server")
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
        self._pool, self.grammars = ThreadPoolExecutor(2, "edgeq-reader"), Grammars(settings.queue, settings.queue_seconds)
        self.bodies = Bodies(self._pool, settings, self.metrics, lambda: self.owner.retry_after)
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
            "/rerank": (self._rerank, ["POST"]),
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
                return self.shown(error).response()

        return run

    def shown(self, error: Exception) -> ApiError:
        """What a client is shown of an error; the log has what it must not see."""
        found = of_exception(error, self.owner.retry_after)
        # Where the file lies is no business of clients.
        path = self.model.file.path
        found.message = found.message.replace(f"{path}: ", "").replace(str(path), path.name)
        if found.status == 500:
            # Where, and not what: a message may quote what a client sent.
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            _log.error("%s in %s", type(error).__name__, ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames))
        return found

    async def _chat(self, request: Request) -> Response:
        def made(asked: Chat, who: Asker) -> TextRequest:
            return TextRequest(asked, [chat_job(self.model, self.settings, asked, who)])

        return await self._texts(request, "chat", await self.bodies.read(request, Chat, made))

    async def _completions(self, request: Request) -> Response:
        def made(asked: Completion, who: Asker) -> TextRequest:
            return TextRequest(asked, completion_jobs(self.model, self.settings, asked, who))

        return await self._texts(request, "completion", await self.bodies.read(request, Completion, made))

    async def _texts(self, request: Request, shape: Shape, asked: TextRequest) -> Response:
        jobs = [await self.grammars.compiled(request, self.model, job) for job in asked.jobs]

        def answer(tickets: Sequence[Ticket]) -> RequestAnswer:
            return self._answer(shape, tickets, keeps=not asked.stream, usage=asked.usage)

        return await respond(request, self.owner, jobs, answer, stream=asked.stream, shown=self.shown)

    def _answer(self, shape: Shape, tickets: Sequence[Ticket], *, keeps: bool, usage: bool = False) -> RequestAnswer:
        text, job = self.model.text, tickets[0].job
        title, stops = self.settings.title(job.model), job.request.stops(text)
        return RequestAnswer(shape, title, self.fingerprint, text, tickets, stops=stops, keeps=keeps, usage=usage)

    async def _messages(self, request: Request) -> Response:
        def made(asked: Messages, who: Asker) -> tuple[bool, Job]:
            return bool(asked.stream), message_job(self.model, self.settings, asked, who)

        stream, job = await self.bodies.read(request, Messages, made)
        job = await self.grammars.compiled(request, self.model, job)

        def answer(tickets: Sequence[Ticket]) -> MessagesAnswer:
            return MessagesAnswer(self.settings.title(job.model), tickets[0], self.model.text)

        return await respond(request, self.owner, [job], answer, stream=stream, shown=self.shown)

    async def _count_tokens(self, request: Request) -> Response:
        def made(asked: CountFields, who: Asker) -> int:
            return len(prompt_of(self.model, asked, use_of(self.model, asked)).tokens)

        return json_of({"input_tokens": await self.bodies.read(request, CountFields, made)})

    async def _responses(self, request: Request) -> Response:
        def made(asked: Responses, who: Asker) -> tuple[Responses, Job]:
            job = responses_job(self.model, self.settings, asked, who)
            # What is left of it until the answer is given: not its text, which may have megabytes.
            return msgspec.structs.replace(asked, input="", instructions=None, text=None), job

        asked, job = await self.bodies.read(request, Responses, made)
        try:
            job = await self.grammars.compiled(request, self.model, job)
        except ApiError as error:
            raise renamed(error) from None

        def answer(tickets: Sequence[Ticket]) -> ResponsesAnswer:
            return ResponsesAnswer(asked, self._answer("chat", tickets, keeps=True))

        return await respond(request, self.owner, [job], answer, stream=bool(asked.stream), shown=self.shown)

    async def _models(self, request: Request) -> Response:
        return json_of({"object": "list", "data": [self._described(name) for name in self.settings.models]})

    async def _one_model(self, request: Request) -> Response:
        self.settings.check_model(request.path_params["name"])
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
        asked = await self.bodies.read(request, Embeddings, lambda fields, who: Embedding(self.model, fields, who))
        return await self._read_texts(request, asked)

    async def _rerank(self, request: Request) -> Response:
        refuse_rankings(self.model)
        asked = await self.bodies.read(request, Rerank, lambda fields, who: Ranking(self.model, fields, who))
        return await self._read_texts(request, asked)

    async def _read_texts(self, request: Request, asked: Embedding | Ranking) -> Response:
        await collected(request, self.owner.submit(asked.jobs), asked)
        title = self.settings.title(None)
        body = await asyncio.get_running_loop().run_in_executor(self._pool, asked.body, title)
        return Response(body, 200, ignored(request), "application/json")

    async def _ollama(self, request: Request) -> Response:
        raise ApiError(
            404, "unsupported_endpoint", "Ollama's interface is not here; clients of it take /v1 as an OpenAI server too"
        )
