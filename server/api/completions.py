"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.api.answers import Answer
from server.api.bodies import read_body
from server.api.calls import Call, make_call
from server.api.errors import ApiError, try_later
from server.api.middleware import COMPLETIONS, outcome_of
from server.api.openapi import WITH_BODY, errors, takes
from server.api.schemas import CompletionAnswer, CompletionBody, StreamEvent
from server.api.service import Service, unavailable
from server.api.sse import COMMENT, DONE, EventStream, event
from server.engine.sequence import Delta
from server.engine.worker import CallFailed, Mailbox, QueueFull, Unavailable

router = APIRouter(tags=["completions"])

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
        **errors(404, 429, 504, *WITH_BODY),
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
    call = await make_call(body, service.served, service.settings, request.state.tenant)
    completion = Completion(request, service, call, submit(service, call))
    if call.stream is None:
        return await completion.whole()
    return EventStream(completion.events(), completion.close)


def submit(service: Service, call: Call) -> Mailbox:
    try:
        return service.worker.submit(call.requests, patient=call.stream is None)
    except QueueFull:
        message = "Too many completions are waiting. Try again soon."
        raise try_later(429, message, "queue_full") from None
    except Unavailable:
        raise unavailable(service.worker.state) from None


class Completion:
    """A call that the engine has, on its way to its caller. Counts how it ends, once."""

    def __init__(self, request: Request, service: Service, call: Call, mailbox: Mailbox) -> None:
        self.request, self.service, self.call, self.mailbox = request, service, call, mailbox
        self.answer = Answer(call, service.served)
        self.arrived: float = request.state.arrived
        self.deadline = self.arrived + (service.settings.request_timeout or math.inf)
        comments = service.settings.keepalive_comment if call.stream else 0
        self.silence = comments or math.inf

    async def events(self) -> AsyncIterator[str]:
        """The stream. A failure is one event, and the last; there is no [DONE] after it."""
        try:
            while not self.answer.complete:
                deltas = await self._take()
                chunks = [chunk for delta in deltas for chunk in self.answer.chunks(delta)]
                events = "".join(map(event, chunks)) or COMMENT
                if self.answer.complete:
                    self._count(self.answer.outcome)
                    events += DONE
                yield events
        except ApiError as error:
            self._count(outcome_of(error.status_code))
            yield event(error.body)

    async def whole(self) -> Response:
        """The answer in one piece, unless its reader leaves first."""
        taking = asyncio.create_task(self._take())
        leaving = asyncio.create_task(disconnected(self.request))
        try:
            await asyncio.wait((taking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise ApiError(499, "The client has left.")  # nobody reads it
            deltas = taking.result()
        except ApiError as error:
            self._count(outcome_of(error.status_code))
            raise
        finally:
            taking.cancel()
            leaving.cancel()
            self.service.worker.abort(self.call.id)
        if self.call.numbers < LARGE:
            content = self.answer.whole(deltas)
        else:
            content = await asyncio.to_thread(self.answer.whole, deltas)
        self._count(self.answer.outcome)
        return Response(content, media_type="application/json")

    def close(self) -> None:
        """The stream is over. If the answer is not, its reader has left."""
        self.service.worker.abort(self.call.id)
        self._count("cancelled")

    async def _take(self) -> list[Delta]:
        """What has come; nothing after a silence."""
        left = self.deadline - time.perf_counter()
        wait = min(self.silence, left)
        try:
            async with asyncio.timeout(None if wait == math.inf else wait):
                return await self.mailbox.take()
        except CallFailed as failure:
            raise failed(failure) from None
        except TimeoutError:
            if wait == left:
                raise took_too_long() from None
            return []

    def _count(self, outcome: str) -> None:
        if self.request.state.outcome is not None:
            return
        self.request.state.outcome = outcome
        metrics = self.service.metrics
        metrics.count(outcome)
        if self.mailbox.first_token is not None:
            metrics.first_token.observe(self.mailbox.first_token - self.arrived)
        if self.answer.complete:
            metrics.duration.observe(time.perf_counter() - self.arrived)
            metrics.queue.observe(min(f.timings.queue for f in self.answer.finished.values()))
            metrics.prompt.observe(self.call.prompt_tokens)
            metrics.generation.observe(self.answer.completion_tokens)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def took_too_long() -> ApiError:
    # Clients repeat every 5xx by themselves, which would not make the answer any faster.
    headers = {"X-Should-Retry": "false"}
    message = "The answer took longer than this server allows."
    return ApiError(504, message, code="request_timeout", headers=headers)


def failed(failure: CallFailed) -> ApiError:
    if failure.code == SHUTDOWN:
        return try_later(503, failure.message, failure.code)
    return ApiError(500, failure.message, code=failure.code)
