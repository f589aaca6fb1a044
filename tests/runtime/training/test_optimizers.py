"""Muon, and what is said of a run: figures a minute without a terminal, and steps that take longer than they must."""

import logging

import pytest
import torch
from torch import nn

from wingbeat.runtime.recordings import progress
from wingbeat.runtime.recordings.progress import RunProgress
from wingbeat.runtime.training import step_times
from wingbeat.runtime.training.optimizers import Muon, build_optimizers, fast_dtype, orthogonal
from wingbeat.runtime.training.step_times import StepTimes


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_muon_in_bfloat16_is_torchs(shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = (
        Muon([ours], 0.01, 0.05, torch.bfloat16),
        torch.optim.Muon([theirs], lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_steps_in_float32_are_nearly_orthogonal():
    values = torch.linalg.svdvals(
        orthogonal(torch.randn(24, 60, generator=torch.Generator().manual_seed(1)), torch.float32)
    )
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_cpu_without_units_for_bfloat16_multiplies_in_float32(monkeypatch):
    matrix = nn.Linear(4, 4, bias=False)
    for has_units, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr("wingbeat.runtime.training.optimizers.has_bfloat16_units", lambda answer=has_units: answer)
        assert fast_dtype(torch.device("cpu")) is dtype
        assert build_optimizers(matrix, 0.1)[0].dtype is dtype
    assert fast_dtype(torch.device("cuda")) is torch.bfloat16


def test_without_a_terminal_a_line_a_minute_is_printed(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with RunProgress("train", total=400, done=100) as shown:
        for step in range(101, 401):
            now[0] += 1.0
            shown.show(step, f"loss {step}")
    assert capsys.readouterr().err.splitlines() == [
        "train 160/400  loss 160  0:04:00 left",
        "train 220/400  loss 220  0:03:00 left",
        "train 280/400  loss 280  0:02:00 left",
        "train 340/400  loss 340  0:01:00 left",
        "train 400/400  loss 400  0:00:00 left",
    ]
    with RunProgress("train", total=1, enabled=False) as shown:
        shown.show(1, "of another process")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "said"), [(0.5, False), (2.0, True)])
def test_a_step_much_slower_than_its_matrix_products_is_named(monkeypatch, caplog, seconds, said):
    now = [0.0]
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: now[0])
    # A product of 64 x 64 x 64 a step, on a machine that makes two of them in a second.
    monkeypatch.setattr(step_times, "flops_per_second", lambda dtype: 2 * 64**3 * 2.0)
    times = StepTimes(torch.float32, torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            with times.measure("forward pass"):
                now[0] += 0.25 * seconds
            with times.measure("optimizers"):
                now[0] += 0.75 * seconds
            times.end_step(lambda: torch.ones(64, 64) @ torch.ones(64, 64))
    told = f"{seconds:.2f} s" in caplog.text and f"optimizers {0.75 * seconds:.2f} s" in caplog.text
    assert (told, len(caplog.records)) == (said, int(said))
