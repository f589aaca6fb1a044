"""What a start shows while it lasts, and at its end."""

import io
import re
import time

import pytest
from rich.console import Console

from wingbeat.deployments.start_up import StartUp

SO_FAR = r"Loading the model: \d+ s so far"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_start_is_never_silent_for_long(terminal: bool):
    out = io.StringIO()
    start_up = StartUp(Console(file=out, force_terminal=terminal, width=60), quiet_s=0.02)
    start_up.event("loading the model")
    deadline = time.monotonic() + 10
    while len(re.findall(SO_FAR, out.getvalue())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    start_up.close()
    assert len(re.findall(SO_FAR, out.getvalue())) >= 2
    start_up._pulse.join(10)
    assert not start_up._pulse.is_alive(), "it ends with the start"


def test_on_a_terminal_the_spinner_ends_with_the_start():
    out = io.StringIO()
    start_up = StartUp(Console(file=out, force_terminal=True, width=60))
    start_up.event("loading [b] the model")
    start_up.ready("http://x/v1", [("model", "m")], "curl")
    start_up.close()
    assert "Loading [b] the model" in out.getvalue()
    assert out.getvalue().rstrip().endswith("curl")
    assert "\x1b[?25h" in out.getvalue(), "the cursor is back"
