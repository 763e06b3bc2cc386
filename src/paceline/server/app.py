"""The HTTP application: routes, errors, the playground's files.

Handlers only read requests and hand them to the scheduler; prompts are tokenised in a worker thread, so that
a long one does not hold up the streams of others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from paceline.errors import PacelineError
from paceline.registry import verifier_names
from paceline.relaxation import PRESETS
from paceline.server.answering import Answering
from paceline.server.errors import ApiError, bad_request, refused, unknown_model
from paceline.server.jobs import Job
from paceline.server.limits import MAX_BODY_BYTES, BodyLimit, KeyCheck
from paceline.server.protocol import ChatCompletionRequest, CompletionRequest
from paceline.server.requests import Work, chat_work, completion_work
from paceline.server.responses import ChatWording, CompletionWording, Envelope, Json, Wording
from paceline.server.scheduler import Scheduler
from paceline.server.token_text import TokenTexts

LOGGER = logging.getLogger("paceline.server")
VERSION = installed_version("paceline")
PLAYGROUND = Path(__file__).parent / "playground"
PING_SECONDS = 15
SEND_SECONDS = 60
"""A client that takes nothing for so long is taken to have left."""
CONTENT_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server presents itself.

    Attributes:
        model: name under which the target is served.
        drafters: names of the loaded ones, the default first.
        default_verifier: of requests that name none; None chooses by temperature.
        num_speculative_tokens: the server's own limit, for the playground.
        keys: API keys; none: everybody is let in.
        max_body_bytes: of a request.
        logs_prompts: whether questions and answers are written to the log.
    """

    model: str
    drafters: tuple[str, ...]
    default_verifier: str | None = None
    num_speculative_tokens: int | str = "auto"
    keys: tuple[bytes, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    logs_prompts: bool = False


def create_app(scheduler: Scheduler, options: ServerOptions) -> FastAPI:
    """The application of one target; the scheduler starts and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await run_in_threadpool(scheduler.stop)

    app = FastAPI(title="paceline", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    app.add_middleware(KeyCheck, keys=options.keys)
    _add_errors(app)
    _add_status(app, scheduler)
    _Endpoints(scheduler, options).add_to(app)
    app.mount("/", _Playground(directory=PLAYGROUND, html=True), name="playground")
    return app


class _Endpoints:
    """The two that answer.

    Args:
        scheduler: does the work.
        options: see `ServerOptions`.
    """

    def __init__(self, scheduler: Scheduler, options: ServerOptions) -> None:
        self._scheduler, self._options = scheduler, options
        self._texts = TokenTexts(scheduler.generator.tokenizer)

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""

        @app.post("/v1/chat/completions")
        async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
            return await self._answer(body, request, chat_work, ChatWording())

        @app.post("/v1/completions")
        async def completions(body: CompletionRequest, request: Request) -> Response:
            return await self._answer(body, request, completion_work, CompletionWording())

        @app.get("/v1/models")
        async def models() -> Json:
            return {"object": "list", "data": [self._model()]}

        @app.get("/v1/models/{model_id:path}")
        async def model(model_id: str) -> Json:
            if model_id != self._options.model:
                raise unknown_model(model_id[:80], self._options.model)
            return self._model()

    def _model(self) -> Json:
        """What is served."""
        options, generator = self._options, self._scheduler.generator
        return {
            "id": options.model,
            "object": "model",
            "created": 0,
            "owned_by": "paceline",
            "max_model_len": generator.target.context_len,
            "paceline": {
                "drafters": list(options.drafters),
                "verifiers": verifier_names(),
                "presets": sorted(PRESETS),
                "default_drafter": options.drafters[0],
                "default_verifier": options.default_verifier,
                "num_speculative_tokens": options.num_speculative_tokens,
                "has_chat_template": generator.has_chat_template,
            },
        }

    async def _answer(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        request: Request,
        read: Callable[[Any, Any], Work],
        wording: Wording,
    ) -> Response:
        """Queue a request and answer it, as a stream or whole."""
        if body.model and body.model != self._options.model:
            raise unknown_model(body.model[:80], self._options.model)
        work = await run_in_threadpool(read, body, self._scheduler.generator)
        job = self._scheduler.submit(work)
        # What the engine refuses is told with its own status, streamed or not.
        await job.admitted()
        drafter = work.questions[0].drafter or self._options.drafters[0]
        num_prompts = len(work.questions) // (body.n or 1)
        answering = Answering(job, Envelope(wording, self._options.model), self._texts, drafter, num_prompts)
        if body.stream:
            events = self._streamed(answering, body)
            return EventSourceResponse(
                events, ping=PING_SECONDS, send_timeout=SEND_SECONDS, headers={"X-Accel-Buffering": "no"}
            )
        return JSONResponse(await self._whole(answering, body, request))

    async def _streamed(
        self, answering: Answering, body: ChatCompletionRequest | CompletionRequest
    ) -> AsyncIterator[dict[str, str]]:
        """A stream's events; a client that leaves cancels its request."""
        is_complete = False
        try:
            async for line in answering.stream(body.wants_usage):
                yield {"data": line}
            is_complete = True
        finally:
            self._end(answering.job, body, "finished" if is_complete else "disconnected")

    async def _whole(
        self, answering: Answering, body: ChatCompletionRequest | CompletionRequest, request: Request
    ) -> Json:
        """The whole answer; while it is made, the client is watched."""
        reading = asyncio.ensure_future(answering.body())
        leaving = asyncio.ensure_future(_disconnected(request))
        status = "failed"
        try:
            await asyncio.wait([reading, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                status = "disconnected"
                raise ApiError(499, "the client has left")
            found = reading.result()
            status = "finished"
            return found
        finally:
            for task in (reading, leaving):
                task.cancel()
            self._end(answering.job, body, status)

    def _end(self, job: Job, body: ChatCompletionRequest | CompletionRequest, status: str) -> None:
        """Free what is left of a request, and log it."""
        if status == "disconnected":
            self._scheduler.metrics.num_disconnected.inc()
        self._scheduler.cancel(job)
        fields: dict[str, Any] = {
            "status": status,
            "choices": len(job.work.questions),
            "prompt_tokens": sum(len(question.prompt_ids) for question in job.work.questions),
            "seconds": round(time.monotonic() - job.arrived, 4),
            "stream": bool(body.stream),
        }
        if job.first_token is not None:
            fields["first_token_seconds"] = round(job.first_token - job.arrived, 4)
        if body.user is not None:
            fields["user"] = body.user[:120]
        if self._options.logs_prompts:
            asked = body.messages if isinstance(body, ChatCompletionRequest) else body.prompt
            fields["asked"] = str(asked)[:2000]
        LOGGER.info("request", extra={"fields": fields})


class _Playground(StaticFiles):
    """The page, with the headers that keep it to itself."""

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        """A file of the page."""
        response = super().file_response(*arguments, **named)
        response.headers.update(_HEADERS)
        return response


def _add_status(app: FastAPI, scheduler: Scheduler) -> None:
    """Routes about the server itself."""

    @app.get("/health")
    async def health() -> Response:
        healthy = scheduler.is_healthy
        return JSONResponse({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)

    @app.get("/version")
    async def version() -> Json:
        return {"version": VERSION}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(scheduler.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    """Every error in OpenAI's form, without paths and traces."""

    def answer(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, headers=dict(error.headers))

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(PacelineError)
    async def engine_error(_: Request, error: PacelineError) -> Response:
        return answer(refused(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return answer(_first_problem(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code in (404, 405):
            return answer(_not_served(request))
        return answer(ApiError(error.status_code, str(error.detail), headers=error.headers or {}))

    @app.exception_handler(Exception)
    async def failure(_: Request, error: Exception) -> Response:
        LOGGER.error("a request failed", exc_info=error)
        return answer(ApiError(500, "the server failed: see its log", kind="server_error"))


def _not_served(request: Request) -> ApiError:
    """A path that there is not, or not for this method (the page, at /, would take any path for GET)."""
    path, method = request.url.path[:80], request.method
    for route in request.app.routes:
        methods = getattr(route, "methods", None)
        if methods and getattr(route, "path", None) == path:
            allowed = ", ".join(sorted(methods))
            return ApiError(405, f"{path} takes {allowed}, not {method}", headers={"Allow": allowed})
    return ApiError(404, f"{method} {path} is not served here")


def _first_problem(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, with the field and the value."""
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"] if part != "body")
    if problem["type"] == "extra_forbidden":
        return bad_request(
            f"{place} is not a field of this request: leave it out", param=place, code="unknown_field"
        )
    if (problem["type"] in {"json_invalid", "missing"} and not place) or problem["type"] == "json_invalid":
        return bad_request(
            f"the body is not valid JSON: {problem.get('ctx', {}).get('error', problem['msg'])}"
        )
    if not place and isinstance(problem.get("input"), bytes | str):
        return bad_request("the body is not read as JSON: send the header Content-Type: application/json")
    if place.startswith("messages.") and ".content" in place and "image_url" in str(problem.get("input")):
        return bad_request(
            f"{place.removesuffix('.str')}: images (image_url) are not served, only text", param="messages"
        )
    value = "" if problem["type"] == "missing" else f" (it is {str(problem.get('input'))[:80]!r})"
    return bad_request(f"{place or 'the body'}: {problem['msg']}{value}", param=place or None)


async def _disconnected(request: Request) -> None:
    """Return once the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
