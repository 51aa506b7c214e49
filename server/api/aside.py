"""Long work leaves the event loop, which answers everybody else in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Few at a time: much of it holds the interpreter, for which the event loop then stands in line.
THREADS = 2

T = TypeVar("T")


def prepare() -> None:
    """Bound the threads of the running loop."""
    executor = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")
    asyncio.get_running_loop().set_default_executor(executor)


async def aside(long: bool, work: Callable[[], T]) -> T:
    """What `work` returns; it is done in a thread if it is long."""
    return await asyncio.to_thread(work) if long else work()
