"""Tokens per round over time on the page, with a mark where another version of the draft head took over."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.page_driver import MARKS, open_page, text
from tests.e2e.page_server import serving
from tests.runtime.learning.test_head_versions import added, of_length
from wingbeat.deployments.learning.routes import HeadVersions, add_drafter_routes
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.runtime.learning.head_versions import HeadLedger

pytestmark = list(MARKS)
LINE = "document.querySelector('#head-picture polyline')?.points.length ?? 0"


class Fleet:
    """An engine that has counted 100 rounds more each time: of 2 tokens by the first head, of 4 by the second one."""

    def __init__(self, ledger: HeadLedger) -> None:
        self._ledger, self._counted = ledger, {0: 0, 1: 0}

    async def snapshot(self) -> FleetSnapshot:
        served = self._ledger.read().served
        self._counted[served] += 100
        by_head = {number: of_length(2.0 + 2 * number, rounds) for number, rounds in self._counted.items() if rounds}
        return FleetSnapshot("demo", {"a": {"head_version": served, "by_head": by_head}})


@pytest.fixture
def ledger(tmp_path):
    made = HeadLedger(tmp_path / "ledger", tmp_path / "configured", "model")
    added(made)
    return made


def test_acceptance_is_drawn_over_time_and_a_swap_is_marked(chromium, ledger):
    """The environment variable WINGBEAT_PICTURES names a folder for a picture."""
    with serving(more_routes=[partial(add_drafter_routes, heads=HeadVersions(ledger, Fleet(ledger)))]) as url:
        open_page(chromium, url)
        chromium.until("!document.querySelector('#heads').hidden")
        assert text(chromium, "#head-version") == "version 0"
        assert "while requests run" in text(chromium, "#head-picture")
        chromium.until(f"{LINE} >= 2")
        assert chromium.value("document.querySelectorAll('#head-picture .swap').length") == 0
        ledger.promote(1, "better")
        chromium.until("document.querySelectorAll('#head-picture .swap').length === 1")
        assert text(chromium, "#head-picture .swap title") == "promoted: version 1"
        assert text(chromium, "#head-version") == "version 1"
        heights = chromium.value("[...document.querySelector('#head-picture polyline').points].map(point => point.y)")
        assert heights[-1] == 0 < heights[0], "the second head's 4 tokens are above the first one's 2"
        label = chromium.value("document.querySelector('#head-picture svg').getAttribute('aria-label')")
        assert label == "4.00 tokens per round now, 1 swap"
        assert chromium.errors == []
        if folder := os.environ.get("WINGBEAT_PICTURES"):
            chromium.picture(Path(folder) / "page_heads.png")
