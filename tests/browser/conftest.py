"""The page in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import pytest

from tests.server.live import Live

if TYPE_CHECKING:  # where it is not installed, the tests skip
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

    Open = Callable[..., Page]


# For one module: as long as it is there, an event loop seems to run in this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium")
    with sync_playwright() as driver:
        # Chromium has no sandbox for root, and /dev/shm is small in containers.
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = driver.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens a view of a server. In the end, no visit may have left an error in the console but the
    `expected` one, nor have asked another host for anything.
    """
    faults: list[str] = []
    with ExitStack() as stack:

        def open_view(
            live: Live, view: str = "write", *, expected: str | None = None, **options: object
        ) -> Page:
            def note(message: ConsoleMessage) -> None:
                known = expected is not None and expected in message.text
                if message.type in ("error", "warning") and not known:
                    faults.append(f"console: {message.text}")

            def check(request: Request) -> None:
                if urlsplit(request.url).netloc != f"127.0.0.1:{live.port}":
                    faults.append(f"another host: {request.url}")

            window = {"width": 1200, "height": 900}
            context = browser.new_context(**cast(Any, {"viewport": window, **options}))
            stack.callback(context.close)
            context.set_default_timeout(60_000)
            page = context.new_page()
            page.on("pageerror", lambda error: faults.append(f"uncaught: {error}"))
            page.on("console", note)
            page.on("request", check)
            page.goto(f"{live.url}/#{view}")
            return page

        yield open_view
    assert not faults
