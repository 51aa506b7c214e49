"""The completions that are open, by the names under which their callers know them: the id of the
answer, and that of the request. It is where a call is found that is to be cancelled.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from server.engine.worker import Worker

REMEMBERED = 10_000  # names of calls that have ended: cancelling one of them is no mistake
CANCELLED = "request_cancelled"

Name = tuple[str, str]  # tenant, name


class Entry:
    """One completion, from its arrival to its end."""

    def __init__(self, name: Name) -> None:
        self.names = [name]
        self.cancelled = asyncio.Event()


class Register:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._open: dict[Name, list[Entry]] = {}  # a caller may use an id of its own twice
        self._ended: OrderedDict[Name, bool] = OrderedDict()  # was it cancelled?

    def enter(self, tenant: str, request: str) -> Entry:
        entry = Entry((tenant, request))
        self._open.setdefault(entry.names[0], []).append(entry)
        return entry

    def begin(self, entry: Entry, call: str) -> None:
        """The engine has the call, which is its second name."""
        name = entry.names[0][0], call
        entry.names.append(name)
        self._open[name] = [entry]
        if entry.cancelled.is_set():
            self._end(entry)

    def leave(self, entry: Entry) -> None:
        """It is over. May be called twice."""
        for name in entry.names:
            entries = self._open.get(name, [])
            if entry in entries:
                entries.remove(entry)
                if not entries:
                    del self._open[name]
                self._ended[name] = entry.cancelled.is_set()
                self._ended.move_to_end(name)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def cancel(self, tenant: str, name: str) -> bool | None:
        """Whether the call is cancelled, now or before; False if it had ended by itself, and None
        if the tenant has no such call.
        """
        entries = self._open.get((tenant, name))
        if entries is None:
            return self._ended.get((tenant, name))
        for entry in entries:
            if not entry.cancelled.is_set():
                entry.cancelled.set()
                self._end(entry)
        return True

    def _end(self, entry: Entry) -> None:
        for _, call in entry.names[1:]:
            self.worker.end(call, CANCELLED, "The request was cancelled.")
