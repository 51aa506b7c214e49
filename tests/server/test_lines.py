"""The lines before sessions: in order, without gaps, whoever gives up and when."""

from __future__ import annotations

import asyncio
import random

import pytest

from server.api.lines import LineFull, Lines

KEY = ("", "s")


def test_in_order_of_arrival() -> None:
    async def main() -> None:
        lines, order = Lines(10), []

        async def come(number: int) -> None:
            leave = await lines.enter(KEY)
            order.append(number)
            await asyncio.sleep(0)
            leave()
            leave()

        await asyncio.gather(*map(come, range(5)))
        assert order == [0, 1, 2, 3, 4]
        assert lines.waiting == 0
        assert lines._lines == {}

    asyncio.run(main())


def test_a_line_has_an_end() -> None:
    async def main() -> None:
        lines = Lines(1)
        leave = await lines.enter(KEY)
        second = asyncio.create_task(lines.enter(KEY))
        await asyncio.sleep(0)
        with pytest.raises(LineFull):
            await lines.enter(KEY)
        (await lines.enter(("", "other")))()
        leave()
        (await second)()
        assert lines._lines == {}

    asyncio.run(main())


def test_who_gives_up_in_the_moment_of_being_called_lets_the_next_one_in() -> None:
    async def main() -> None:
        lines = Lines(10)
        leave = await lines.enter(KEY)
        second, third = (asyncio.create_task(lines.enter(KEY)) for _ in range(2))
        await asyncio.sleep(0)
        second.cancel()
        leave()
        (await third)()
        assert second.cancelled()
        assert lines._lines == {}

    asyncio.run(main())


def test_b018_any_order_of_giving_up_leaves_nothing_behind() -> None:
    lot = random.Random(0)

    async def main() -> None:
        lines, inside = Lines(1000), 0

        async def come() -> None:
            nonlocal inside
            leave = await lines.enter(KEY)
            inside += 1
            assert inside == 1
            try:
                await asyncio.sleep(lot.random() / 1000)
            finally:
                inside -= 1
                leave()

        for _ in range(20):
            tasks = [asyncio.create_task(come()) for _ in range(20)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(lot.random() / 500)
                lot.choice(tasks).cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(r is None or isinstance(r, asyncio.CancelledError) for r in done)
            assert lines._lines == {}
            assert lines.waiting == 0

    asyncio.run(main())
