"""Shared drafters that cannot be placed; what becomes of those that are lost is in `tests/chaos`."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


def test_an_application_whose_drafters_no_node_can_hold_serves_without_them(demo_app, start_app):
    options = {"num": 1, "start_timeout_s": 1.0}
    with start_app("e2e-unplaced", drafters=options, drafter_resources={"nowhere": 1}) as app:
        assert app.engine()["drafter_state"] == "none"
        assert not app.engine()["drafter_lacks_room"]
        prompt = "def read_config(path):\n    "
        assert app.text(prompt) == demo_app.text(prompt)
