"""Runs the engine in a thread of its own; the only file that knows how.

The event loop puts messages into an inbox. The thread reads them before each step and sends back
all events of a step with one wake-up. Public methods of Worker belong to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from model.step import Model, Sampling
from model.tokenizer import Tokenizer
from server.engine.rowmap import RowRun
from server.engine.sequence import Delta, Event, Failure, Request
from server.engine.sessions import Reset, SessionView
from server.engine.snapshot import Snapshot

log = logging.getLogger("onerow")

T = TypeVar("T")
OnStep = Callable[[float, int], None]  # how long a step took, and the tokens computed in it

SLOW = 16  # deltas per choice that may wait for their reader before they are joined
TOTALS = [name for name in Snapshot._fields if name.endswith("_total")]


class Engine(Protocol):
    """What the worker needs of an engine. Synchronous, and used by the worker's thread alone."""

    @property
    def model(self) -> Model: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def name(self) -> str: ...
    @property
    def root(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def rows_dtype(self) -> str: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, requests: Sequence[Request]) -> None: ...
    def abort(self, call: str, /) -> bool: ...
    @property
    def patience(self) -> float | None: ...
    def step(self) -> list[Event]: ...
    def rest(self) -> None: ...
    def snapshot(self) -> Snapshot: ...
    def session(self, tenant: str, name: str) -> SessionView | None: ...
    def create(self, tenant: str, name: str) -> SessionView | None: ...
    def fork(self, tenant: str, name: str, new: str) -> SessionView | None: ...
    def rewind(self, tenant: str, name: str, n: int) -> SessionView | None: ...
    def forget(self, tenant: str, name: str) -> bool: ...
    def reset(self, tenant: str | None) -> Reset: ...
    def row_runs(self, tenant: str | None) -> list[RowRun]: ...
    def close(self) -> None: ...


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # no new work; what runs may end
    FAILED = "failed"  # for good


class QueueFull(Exception):
    """More choices are open than the server is willing to hold."""


class Unavailable(Exception):
    """The worker takes no work: it is loading, draining or has failed."""


class CallFailed(Exception):
    """A call ended without an answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.code, self.message = failure.code, failure.message


@dataclass(frozen=True)
class Served:
    """What HTTP may know of the engine: facts that do not change."""

    name: str
    root: str
    n_ctx: int
    n_vocab: int
    tokenizer: Tokenizer
    device: str
    dtype: str
    rows_dtype: str

    @cached_property
    def token_names(self) -> list[str]:
        """Every token's text; where its bytes are no text, `bytes:` and their hexadecimal form.
        Names are unique, as tokens are.
        """
        return [_name(token) for token in self.tokenizer.token_bytes]


@dataclass(frozen=True, slots=True)
class Submit:
    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Abort:
    call: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Something to do or to look up between two steps; `answer` belongs to the event loop."""

    question: Callable[[Engine], object]
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the thread after this step, whatever is left to do."""


Message = Submit | Abort | Ask | Stop


class Mailbox:
    """The events of one call that its reader has not taken yet.

    Memory is bounded by the call's own tokens. With `patient` the reader is woken at the end only.
    """

    def __init__(self, choices: int, *, patient: bool) -> None:
        self.first_token: float | None = None  # when it came, on the clock of time.perf_counter
        self._limit = 0 if patient else SLOW * choices
        self._patient = patient
        self._open = choices
        self._waiting: list[Delta] = []
        self._failure: Failure | None = None
        self._reader: asyncio.Future[None] | None = None  # it waits
        self._until = math.inf  # for so long, on the clock of time.perf_counter
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Deltas that may be taken."""
        return len(self._waiting)

    @property
    def _ready(self) -> bool:
        return self.ended or bool(self._waiting and not self._patient)

    @property
    def ended(self) -> bool:
        """Nothing more will come; what waits may still be taken."""
        return self._open == 0 or self._failure is not None

    def put(self, event: Event) -> None:
        if isinstance(event, Failure):
            self._failure = event
        else:
            self._waiting.append(event)
            self._open -= event.finish is not None
            if self.first_token is None and event.completion_tokens:
                self.first_token = time.perf_counter()
        if self._ready:
            self._wake()

    async def take(self, until: float = math.inf) -> list[Delta]:
        """All deltas that wait; none if there are none by then, on the clock of time.perf_counter.
        Raises CallFailed when the call has failed; what came before is still given to a reader who
        takes it piece by piece.
        """
        if not self._ready:
            await self._wait(until)
        if not self._ready:
            return []
        deltas, self._waiting = self._waiting, []
        if self._failure is not None and (self._patient or not deltas):
            raise CallFailed(self._failure)
        return joined(deltas) if len(deltas) > self._limit else deltas

    async def _wait(self, until: float) -> None:
        self._until = until
        self._reader = asyncio.get_running_loop().create_future()
        if self._alarm is None:
            self._set_alarm()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _set_alarm(self) -> None:
        """One alarm is enough for many tokens: when it goes off too early, it is set again. The
        times until which a reader waits do not go back.
        """
        self._alarm = None
        left = self._until - time.perf_counter()
        if left <= 0:
            self._wake()
        elif left < math.inf:
            self._alarm = asyncio.get_running_loop().call_later(left, self._set_alarm)


class Worker:
    """The engine's thread, and the calls that are open."""

    def __init__(self, load: Callable[[], Engine], max_open: int) -> None:
        self.state = State.LOADING
        self.served: Served | None = None  # from READY on
        self.snapshot = Snapshot()  # the last one; replaced by the thread after each step
        self.max_open = max_open
        self.open = 0  # choices that were submitted and have not ended
        self.on_step: OnStep = lambda seconds, tokens: None  # called in the thread
        self._load = load
        self._calls: dict[str, tuple[Mailbox, int]] = {}  # a call and its open choices
        self._asked: set[asyncio.Future[Any]] = set()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Load the engine, try it, and serve. Returns at once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, requests: Sequence[Request], *, patient: bool = False) -> Mailbox:
        """Hand in all choices of one call, or none: QueueFull, Unavailable."""
        if self.state is not State.READY:
            raise Unavailable(self.state)
        if self.open + len(requests) > self.max_open:
            raise QueueFull
        mailbox = Mailbox(len(requests), patient=patient)
        self._calls[requests[0].id] = mailbox, len(requests)
        self.open += len(requests)
        self._inbox.put(Submit(requests))
        return mailbox

    def abort(self, call: str) -> bool:
        """Drop a call within one step, without an event. False if it has ended or never was."""
        if self._forget(call) is None:
            return False
        self._inbox.put(Abort(call))
        return True

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Have the thread call `question` between two steps, and raise what it raises; Unavailable
        if the engine has failed.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        if self.state is State.FAILED:
            raise Unavailable(self.state)
        self._asked.add(answer)
        self._inbox.put(Ask(question, answer))
        try:
            return await answer
        finally:
            self._asked.discard(answer)

    def drain(self) -> None:
        """Take no new work from now on."""
        if self.state is not State.FAILED:
            self.state = State.DRAINING

    @property
    def idle(self) -> bool:
        return not self._calls

    def end(self, call: str, code: str, message: str) -> None:
        """End an open call with a failure; one that is not open any more stays as it is."""
        if call in self._calls:
            self._inbox.put(Abort(call))
            self._deliver([Failure(call, code, message)])

    def end_all(self, code: str, message: str) -> None:
        """End every open call with a failure."""
        for call in list(self._calls):
            self.end(call, code, message)

    def stop(self, timeout: float) -> bool:
        """End the thread after the step that it is in. False if that takes longer."""
        self._inbox.put(Stop())
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _forget(self, call: str) -> Mailbox | None:
        mailbox, choices = self._calls.pop(call, (None, 0))
        self.open -= choices
        return mailbox

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.id not in self._calls:  # aborted while the event was on its way
                continue
            mailbox, choices = self._calls[event.id]
            mailbox.put(event)
            if mailbox.ended:
                self._forget(event.id)
            elif isinstance(event, Delta) and event.finish is not None:
                self._calls[event.id] = mailbox, choices - 1
                self.open -= 1

    def _loaded(self, served: Served) -> None:
        self.served = served
        if self.state is State.LOADING:
            self.state = State.READY
            log.info("ready: %s, %s, %s", served.name, served.device, served.dtype)

    def _failed(self) -> None:
        self.state = State.FAILED
        self.end_all("engine_error", "The engine has failed.")
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(Unavailable(self.state))

    # From here on: the thread.

    def _run(self) -> None:
        try:
            engine = self._load()
            before = try_out(engine)
        except BaseException as error:  # SystemExit too: whatever stops the load ends the server
            log.critical("cannot start: %s", error or type(error).__name__)
            log.debug("cannot start", exc_info=True)
            self._post(self._failed)
            return
        self._publish(engine, before)
        self._post(self._loaded, served(engine))
        try:
            while self._read_inbox(engine, before):
                began, computed = time.perf_counter(), self.snapshot.rows_computed_total
                events = engine.step()
                self._publish(engine, before)
                seconds = time.perf_counter() - began
                self.on_step(seconds, self.snapshot.rows_computed_total - computed)
                if events:
                    self._post(self._deliver, events)
            engine.close()
        except BaseException:
            log.critical("the engine failed", exc_info=True)
            self._post(self._failed)

    def _read_inbox(self, engine: Engine, before: Snapshot) -> bool:
        """Do what the messages say; wait for one while there is no other work. False to stop."""
        while True:
            try:
                message = self._inbox.get(not engine.has_work, engine.patience)
            except queue.Empty:
                if engine.has_work:
                    return True
                engine.rest()
                self._publish(engine, before)
                continue
            match message:
                case Submit(requests):
                    engine.submit(requests)
                case Abort(call):
                    engine.abort(call)
                    if not engine.has_work:
                        self._publish(engine, before)
                case Ask(question, answer):
                    try:
                        found = partial(answer.set_result, question(engine))
                    except Exception as error:  # it is the asker's, not the engine's
                        found = partial(answer.set_exception, error)
                    self._publish(engine, before)
                    self._post(_answer, answer, found)
                case Stop():
                    return False

    def _publish(self, engine: Engine, before: Snapshot) -> None:
        now = engine.snapshot()
        since = {name: getattr(now, name) - getattr(before, name) for name in TOTALS}
        self.snapshot = now._replace(**since)

    def _post(self, method: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(method, *args)
        except RuntimeError:  # the loop has ended, and with it everyone who would listen
            log.debug("nobody listens to the engine any more")


def _answer(answer: asyncio.Future[Any], found: Callable[[], None]) -> None:
    if not answer.done():  # whoever asked may have left
        found()


def served(engine: Engine) -> Served:
    return Served(
        name=engine.name,
        root=engine.root,
        n_ctx=engine.model.n_ctx,
        n_vocab=engine.model.n_vocab,
        tokenizer=engine.tokenizer,
        device=engine.device,
        dtype=engine.dtype,
        rows_dtype=engine.rows_dtype,
    )


def try_out(engine: Engine) -> Snapshot:
    """Generate one token, so that ready means ready. Returns the totals from which to count."""
    prompt = (engine.tokenizer.end_of_text,)
    trial = Request("trial", 0, prompt, 1, sampling=Sampling(temperature=0.0), use_cache=False)
    engine.submit([trial])
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failure):
                raise RuntimeError(f"the test generation failed: {event.message}")
    return engine.snapshot()


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """One delta per choice: texts and tokens joined, the latest counts."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.index, []).append(delta)
    return [
        replace(
            parts[-1],
            text="".join(part.text for part in parts),
            tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        )
        for parts in choices.values()
    ]


def _name(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
