"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.api.answers import Answer
from server.api.aside import aside
from server.api.bodies import read_body
from server.api.calls import Call, make_call
from server.api.errors import ApiError, shown, try_later
from server.api.lines import Leave, LineFull
from server.api.middleware import COMPLETIONS, outcome_of
from server.api.openapi import ALWAYS, WITH_BODY, errors, takes
from server.api.register import CANCELLED
from server.api.schemas import CancelAnswer, CompletionAnswer, CompletionBody, StreamEvent
from server.api.service import Service
from server.api.sessions import queue_full
from server.api.sse import COMMENT, DONE, EventStream, event
from server.engine.sequence import Delta
from server.engine.worker import CallFailed, Mailbox, QueueFull

router = APIRouter(tags=["completions"])

T = TypeVar("T")

SHUTDOWN = "shutting_down"
LARGE = 5000  # log-probabilities from which on an answer is made off the event loop


@router.post(
    COMPLETIONS,
    summary="Complete a text",
    responses={
        200: {
            "model": CompletionAnswer,
            "description": "The answer, whole; or, with stream, as events that end with [DONE].",
            "content": {"text/event-stream": {"schema": StreamEvent.model_json_schema()}},
        },
        **errors(404, 429, 499, 504, *WITH_BODY),
    },
    openapi_extra=takes(CompletionBody, prompt="Once upon a time", max_tokens=32, temperature=0),
)
async def complete(request: Request) -> Response:
    """The completions call of OpenAI, with the options of vLLM, sessions, and a cache that can
    be left out. `null` is the same as leaving a field out. Nothing is cut silently: a prompt that
    does not fit is refused.
    """
    service = Service.of(request)
    body = await read_body(request, CompletionBody)
    turn = Turn(request, service, body.session_id)
    try:
        await turn.wait()
        held = await turn.held_tokens(body)
        call = await make_call(body, service.served, service.settings, turn.tenant, held)
        completion = Completion(request, service, call, submit(service, call), turn)
    except BaseException:
        turn.end()
        raise
    turn.begin(call.id)
    if call.stream is None:
        return await completion.whole()
    return EventStream(completion.events(), completion.close)


@router.post(
    COMPLETIONS + "/{id}/cancel",
    summary="Cancel a completion",
    responses=errors(404, *ALWAYS),
)
async def cancel(request: Request, id: str) -> CancelAnswer:
    """The id is that of the answer, or the X-Request-Id of the request. What is cancelled ends
    with the error `request_cancelled`. Asking again, or too late, is no mistake: `cancelled` says
    what has become of it.
    """
    cancelled = Service.of(request).register.cancel(request.state.tenant, id)
    if cancelled is None:
        raise ApiError(404, f"There is no completion {shown(id)}.", code="completion_not_found")
    return CancelAnswer(id=id, cancelled=cancelled)


class Turn:
    """A request's turn, from its arrival to its end. Until its turn comes in its session, if it
    has one, it waits; it may be cancelled at any time.
    """

    def __init__(self, request: Request, service: Service, name: str | None) -> None:
        self.request, self.service, self.name = request, service, name
        self.tenant: str = request.state.tenant
        self.entry = service.register.enter(self.tenant, request.state.id)
        self._leave: Leave = lambda: None
        self._begun = False

    async def wait(self) -> None:
        """Wait in line: the place in it is that of arrival, however long the text is."""
        if self.name is None:
            return
        left = deadline_of(self.request, self.service) - time.perf_counter()
        try:
            async with asyncio.timeout(None if left == math.inf else left):
                await self.unless_left(self._enter(self.name))
        except LineFull:
            raise queue_full() from None
        except TimeoutError:
            raise took_too_long() from None

    async def _enter(self, name: str) -> None:
        # Kept in here: the turn may come in the very moment in which nobody waits for it any more.
        self._leave = await self.service.lines.enter((self.tenant, name))

    async def held_tokens(self, body: CompletionBody) -> Sequence[int]:
        """What the session holds, if the prompt is to go on from there."""
        if self.name is None or body.session_mode == "match":
            return ()
        tenant, name = self.tenant, self.name
        view = await self.service.worker.ask(lambda engine: engine.session(tenant, name))
        return view.tokens if view else ()

    def begin(self, call: str) -> None:
        """The engine has the call: whoever cancels it or deletes the session ends it."""
        self.service.register.begin(self.entry, call)
        if self.name is not None:
            self.service.turns[self.tenant, self.name] = call
            self._begun = True

    def end(self) -> None:
        """Let the next one in."""
        if self.name is not None and self._begun:
            self.service.turns.pop((self.tenant, self.name), None)
            self._begun = False
        self.service.register.leave(self.entry)
        self._leave()

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless its reader leaves or cancels it first."""
        working = asyncio.create_task(work)
        leaving = asyncio.create_task(disconnected(self.request))
        cancelling = asyncio.create_task(self.entry.cancelled.wait())
        try:
            await asyncio.wait((working, leaving, cancelling), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if cancelling.done():
                raise cancelled("The request was cancelled.")
            raise ApiError(499, "The client has left.")  # nobody reads it
        finally:
            for task in (working, leaving, cancelling):
                task.cancel()


def submit(service: Service, call: Call) -> Mailbox:
    try:
        return service.worker.submit(call.requests, patient=call.stream is None)
    except QueueFull:
        raise queue_full() from None


class Completion:
    """A call that the engine has, on its way to its caller. Counts how it ends, once."""

    def __init__(
        self, request: Request, service: Service, call: Call, mailbox: Mailbox, turn: Turn
    ) -> None:
        self.request, self.service, self.call, self.mailbox = request, service, call, mailbox
        self.turn = turn
        self.answer = Answer(call, service.served)
        self.arrived: float = request.state.arrived
        self.deadline = deadline_of(request, service)
        comments = service.settings.keepalive_comment if call.stream else 0
        self.silence = comments or math.inf

    async def events(self) -> AsyncIterator[str]:
        """The stream. A failure is one event, and the last; there is no [DONE] after it."""
        try:
            while not self.answer.complete:
                deltas = await self._take()
                events = "".join(map(self.answer.events, deltas)) or COMMENT
                if self.answer.complete:
                    self._count(self.answer.outcome)
                    events += DONE
                yield events
        except ApiError as error:
            self._count(outcome_of(error.status_code))
            yield event(error.body)

    async def whole(self) -> Response:
        """The answer in one piece, unless its reader leaves first."""
        try:
            deltas = await self.turn.unless_left(self._take())
        except ApiError as error:
            self._count(outcome_of(error.status_code))
            raise
        finally:
            self.service.worker.abort(self.call.id)
            self.turn.end()
        content = await aside(self.call.numbers >= LARGE, lambda: self.answer.whole(deltas))
        self._count(self.answer.outcome)
        return Response(content, media_type="application/json")

    def close(self) -> None:
        """The stream is over. If the answer is not, its reader has left."""
        self.service.worker.abort(self.call.id)
        self.turn.end()
        self._count("cancelled")

    async def _take(self) -> list[Delta]:
        """What has come; nothing after a silence."""
        try:
            deltas = await self.mailbox.take(min(time.perf_counter() + self.silence, self.deadline))
        except CallFailed as failure:
            raise failed(failure) from None
        if not deltas and time.perf_counter() >= self.deadline:
            raise took_too_long()
        return deltas

    def _count(self, outcome: str) -> None:
        if self.request.state.outcome is not None:
            return
        self.request.state.outcome = outcome
        self.request.state.facts = {"call": self.call.id, **self.answer.facts()}
        metrics = self.service.metrics
        metrics.count(outcome)
        if self.mailbox.first_token is not None:
            metrics.first_token.observe(self.mailbox.first_token - self.arrived)
        if self.answer.complete:
            metrics.duration.observe(time.perf_counter() - self.arrived)
            metrics.queue.observe(min(f.timings.queue for f in self.answer.finished.values()))
            metrics.prompt.observe(self.call.prompt_tokens)
            for seconds in self.answer.seconds_per_token:
                metrics.output_token.observe(seconds)
            metrics.generation.observe(self.answer.completion_tokens)


def deadline_of(request: Request, service: Service) -> float:
    """When the answer must be there, on the clock of time.perf_counter."""
    arrived: float = request.state.arrived
    return arrived + (service.settings.request_timeout or math.inf)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def took_too_long() -> ApiError:
    # Clients repeat every 5xx by themselves, which would not make the answer any faster.
    headers = {"X-Should-Retry": "false"}
    message = "The answer took longer than this server allows."
    return ApiError(504, message, code="request_timeout", headers=headers)


def cancelled(message: str) -> ApiError:
    # What gRPC's CANCELLED is in HTTP. Clients do not repeat it by themselves, as they do a 409.
    return ApiError(499, message, code=CANCELLED)


def failed(failure: CallFailed) -> ApiError:
    if failure.code == SHUTDOWN:
        return try_later(503, failure.message, failure.code)
    if failure.code == CANCELLED:
        return cancelled(failure.message)
    return ApiError(500, failure.message, code=failure.code)
