"""A short soak: everything at once, with a pool that is far too small, and nothing is left over."""

from __future__ import annotations

import pytest

from tests.conftest import ServeLive
from tests.server.test_same_answer import TinyModel
from tests.soak import Soak


@pytest.mark.slow
def test_b016_b019_b020_b102_b110_nothing_leaks(serve_live: ServeLive) -> None:
    live = serve_live(TinyModel(), rows=200, max_running=5, max_queue=6, max_sessions=6)
    soak = Soak(live.url)
    soak.run(5, each=4)
    assert live.worker.open == 0
    assert live.worker.idle
    service = live.app.state.service
    assert service.register._open == {}
    assert service.lines._lines == {}
    assert service.turns == {}
    assert live.snapshot.rows_evicted_total > 0
