"""Output of a start while it lasts."""

import io
import re
import time

import pytest
from rich.console import Console

from wingbeat.deployments.start_progress.progress import Progress

SO_FAR = r"Loading the model: \d+ s so far"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_start_is_never_silent_for_long(terminal: bool):
    out = io.StringIO()
    start_up = Progress(Console(file=out, force_terminal=terminal, width=60), quiet_s=0.02)
    start_up.event("loading the model")
    deadline = time.monotonic() + 10
    while len(re.findall(SO_FAR, out.getvalue())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    start_up.close()
    assert len(re.findall(SO_FAR, out.getvalue())) >= 2
    start_up._pulse.join(10)
    assert not start_up._pulse.is_alive(), "it ends with the start"


def lines_of(pid: int, *texts: str) -> dict:
    """Log lines of a process, as Ray hands them over."""
    return {"ip": "::1", "pid": pid, "lines": [f"INFO 2026-01-02 03:04:05,678 wingbeat.a: {text}" for text in texts]}


def test_every_phase_that_runs_is_named_with_its_model_and_none_that_has_ended():
    start_up = Progress(Console(file=io.StringIO(), width=200), quiet_s=60)
    start_up.event("starting the router, the verifier and its drafter")
    start_up.worker_lines(lines_of(1, "loading the model a (float32 on cpu)", "measuring the forward passes of a"))
    start_up.worker_lines(lines_of(2, "trying the drafter x of b on short texts"))
    start_up.worker_lines(lines_of(2, "drafter x: accepted 0.8 by depth, in a self-test of 4.2 s"))
    assert [text for text, _ in start_up._running_phases()] == ["Measuring the forward passes of a"]
    start_up.worker_lines(lines_of(2, "measuring the forward passes of b"))
    running = ["Measuring the forward passes of a", "Measuring the forward passes of b"]
    assert [text for text, _ in start_up._running_phases()] == running
    start_up.worker_lines(lines_of(1, "measured the forward passes of a in 3.0 s"))
    start_up.worker_lines(lines_of(2, "measured the forward passes of b in 3.0 s"))
    assert [text for text, _ in start_up._running_phases()] == ["Starting the router, the verifier and its drafter"]
    start_up.close()


def test_on_a_terminal_the_spinner_ends_with_the_start():
    out = io.StringIO()
    start_up = Progress(Console(file=out, force_terminal=True, width=60))
    start_up.event("loading [b] the model")
    start_up.ready("http://x/v1", [("model", "m")], "curl")
    start_up.close()
    assert "Loading [b] the model" in out.getvalue()
    assert out.getvalue().rstrip().endswith("curl")
    assert "\x1b[?25h" in out.getvalue(), "the cursor is back"
