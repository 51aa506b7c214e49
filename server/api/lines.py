"""The line before each session: turns, forks and rewinds of one session happen one by one, in the
order in which they arrived.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from server.engine.snapshot import SessionKey

Leave = Callable[[], None]


class LineFull(Exception):
    """More requests wait for their sessions than the server is willing to hold."""


class Lines:
    """All lines of a server. At most `max_waiting` requests stand in them, the first ones apart."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.waiting = 0
        self._lines: dict[SessionKey, deque[asyncio.Future[None]]] = {}

    async def enter(self, key: SessionKey) -> Leave:
        """Wait for one's turn. Returns what ends it, which may be called twice. Raises LineFull."""
        line = self._lines.setdefault(key, deque())
        if line and self.waiting >= self.max_waiting:
            raise LineFull
        place = asyncio.get_running_loop().create_future()
        line.append(place)

        def leave() -> None:
            if place not in line:
                return
            first = line[0] is place
            line.remove(place)
            if not line:
                del self._lines[key]
            elif first and not line[0].done():  # who has just given up lets the next one in
                line[0].set_result(None)

        if line[0] is place:
            return leave
        self.waiting += 1
        try:
            await place
        except BaseException:
            leave()
            raise
        finally:
            self.waiting -= 1
        return leave
