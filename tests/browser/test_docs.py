"""GET /docs in a real browser: it works, and asks no other host for anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conftest import ServeLive

if TYPE_CHECKING:
    from tests.browser.conftest import Open


def test_it_shows_every_route_and_tries_one(serve_live: ServeLive, visit: Open) -> None:
    live = serve_live()
    page = visit(live)
    page.goto(f"{live.url}/docs")
    page.wait_for_selector("#operations-completions-complete_v1_completions_post")
    document = live.client.get("/openapi.json").json()
    operations = sum(len(path) for path in document["paths"].values())
    assert page.locator(".opblock").count() == operations
    page.locator("[id^=operations-operations-health]").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    page.wait_for_selector(".live-responses-table >> text=ready")
