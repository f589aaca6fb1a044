"""The optimizer loop of a training run: schedule, accumulation, processes, progress, and crash-safe checkpoints.

A `Task` supplies the model, the loss and the inputs; the loop is the same for all tasks.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wingbeat.runtime.recordings.format import write_atomically
from wingbeat.runtime.recordings.progress import RunProgress
from wingbeat.runtime.training.curves import Curves
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.evaluation import HeadAcceptance
from wingbeat.runtime.training.optimizers import build_optimizers, fast_dtype
from wingbeat.runtime.training.parallel import Part, Ranks
from wingbeat.runtime.training.state import STATE_FILE, TrainingState
from wingbeat.runtime.training.step_times import StepTimes

METRICS_FILE = "metrics.json"
_GRADIENT_NORM = 1.0


class Inputs(NamedTuple):
    """Tensors that the loss takes for a part of a batch, and their number of tokens."""

    tensors: tuple
    num_tokens: int


@dataclass(frozen=True)
class Task:
    """Describes what a run trains."""

    model: nn.Module
    """Module with the weights that are trained and saved."""
    loss: nn.Module
    """Module that contains `model` and maps `Inputs.tensors` to the mean loss of a part of a batch."""
    inputs: Callable[[int, Part], Inputs]
    """Function (step, part) -> inputs; must be pure, so that a resumed run gets the same inputs as an uninterrupted
    run.
    """
    export: Callable[[], None]
    """Function that writes the weights in the format that users load; called with every checkpoint and at the end."""
    validate: Callable[[], HeadAcceptance] | None = None
    """Function that measures acceptance with the current weights."""
    accepted: Callable[[], list[Tensor]] = list
    """Function that returns, for each step of the chains of the last pass, the mean probability that the verifier gives
    to the head's likeliest draft. The list is empty if the probabilities are unknown.
    """
    validation_interval_steps: int = 0
    """Number of steps between measurements; 0 measures only at the end."""


class History(NamedTuple):
    """History of a finished run for the metrics file."""

    losses: list[tuple[int, float]]
    validations: list[tuple[int, HeadAcceptance]]
    num_tokens: int
    seconds: float


def precision(config: TrainDrafterConfig) -> torch.dtype:
    """The dtype in which matrix products are computed."""
    return fast_dtype(torch.device(config.device)) if config.precision == "auto" else getattr(torch, config.precision)


def autocast(config: TrainDrafterConfig) -> Any:
    """Context in which matrix products are computed: bfloat16 autocast, or a context that changes nothing for
    float32.
    """
    if precision(config) is torch.float32:
        return nullcontext()
    return torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16)


def prepare(config: TrainDrafterConfig) -> None:
    """Set thread count and seed, and create the output folder."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    config.output.mkdir(parents=True, exist_ok=True)


def optimize(config: TrainDrafterConfig, ranks: Ranks, task: Task) -> History:
    """Run the remaining steps of `config.steps`, with checkpoints and measurements at intervals.

    The state file is deleted after the last step. Every process returns the same losses; only the first writes files.

    Raises:
        FloatingPointError: the loss is not finite.
        ValueError: the checkpoint to resume was made with other settings, or the batch does not split into equal parts.
    """
    optimizers = build_optimizers(task.model, config.learning_rate)
    state = TrainingState(task.model, optimizers)
    if config.resume and (config.output / STATE_FILE).exists():
        state.load(config.output / STATE_FILE, config, ranks.device)
    # All processes wait here, because the first process must not overwrite the state file before all processes have
    # read it.
    ranks.wait_for_first()
    with Curves(config, state.step, enabled=ranks.is_first) as curves:
        _Run(config, ranks, task, optimizers, state, curves).finish()
    if ranks.is_first:
        (config.output / STATE_FILE).unlink(missing_ok=True)
    return History(state.losses, state.validations, state.num_tokens, state.seconds)


def write_metrics(config: TrainDrafterConfig, history: History, **extra: Any) -> None:
    """Write metrics.json to the folder of the weights, with settings, loss history, speed, and `extra`."""
    metrics = {
        "settings": config.model_dump(mode="json", exclude={"corpus", "output"}),
        "torch": torch.__version__,
        "num_tokens": history.num_tokens,
        "seconds": round(history.seconds, 1),
        **extra,
        "validations": [{"step": step, **acceptance._asdict()} for step, acceptance in history.validations],
        "losses": [[step, round(loss, 4)] for step, loss in history.losses],
    }
    text = json.dumps(metrics, indent=1).replace("\n   ", " ").replace("\n  ]", "]")
    write_atomically(config.output / METRICS_FILE, lambda path: path.write_text(text + "\n"))


class _Run:
    """Runs the steps of one process from the current state to the last step."""

    def __init__(
        self,
        config: TrainDrafterConfig,
        ranks: Ranks,
        task: Task,
        optimizers: list[torch.optim.Optimizer],
        state: TrainingState,
        curves: Curves,
    ) -> None:
        self.config, self.ranks, self.task = config, ranks, task
        self.optimizers, self.state, self.curves = optimizers, state, curves
        self.loss = task.loss
        self.times = StepTimes(precision(config), ranks.device)
        if ranks.world_size > 1:
            self.loss = DistributedDataParallel(task.loss)

    def finish(self) -> None:
        config, state = self.config, self.state
        saved_at = started_at = time.monotonic()
        seconds_before = state.seconds
        with RunProgress("train", config.steps, state.step, self.ranks.is_first) as progress:
            while state.step < config.steps:
                self._validate_when_due()
                before = time.monotonic()
                rate = config.learning_rate * config.learning_rate_scale(state.step)
                num_tokens, loss = self._step(state.step, rate)
                now = time.monotonic()
                logged_step = state.step
                if state.record(loss, num_tokens, seconds_before + now - started_at, config.log_interval_steps):
                    self.curves.loss(logged_step, loss, rate)
                progress.show(state.step, self._note(loss, num_tokens / (now - before)))
                if now - saved_at >= config.checkpoint_interval_s and state.step < config.steps:
                    self._checkpoint()
                    saved_at = time.monotonic()
        if self.ranks.is_first:
            # The checkpoint is written before the measurement, so that no steps are lost if the run is killed during
            # the measurement.
            self._checkpoint()
            self._validate()
            self.curves.draw(state)

    def _step(self, step: int, rate: float) -> tuple[int, float]:
        """Runs an optimizer step; returns the step's number of tokens and mean loss, both over all processes."""
        rounds = self.config.accumulation_steps
        num_tokens, total = 0, torch.zeros((), device=self.ranks.device)
        times = self.times
        for index in range(rounds):
            with times.measure("data"):
                inputs = self.task.inputs(step, self.ranks.part(index, rounds))
            # Processes exchange gradients once per step, in the backward pass of the last accumulation round.
            with self._exchange_on(index == rounds - 1):
                with times.measure("forward pass"), autocast(self.config):
                    loss = self.loss(*inputs.tensors) / rounds
                with times.measure("backward pass"):
                    loss.backward()
            num_tokens += inputs.num_tokens
            total = total + loss.detach()
        loss = float(self.ranks.mean(total))
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {step}")
        with times.measure("optimizers"):
            nn.utils.clip_grad_norm_(self.task.model.parameters(), _GRADIENT_NORM)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        times.end_step(lambda: self._passes_apart(step))
        return num_tokens * self.ranks.world_size, loss

    def _passes_apart(self, step: int) -> None:
        """Runs a step's forward and backward passes again and discards the gradients; used to count operations."""
        for index in range(self.config.accumulation_steps):
            inputs = self.task.inputs(step, self.ranks.part(index, self.config.accumulation_steps))
            with autocast(self.config):
                loss = self.task.loss(*inputs.tensors)
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _note(self, loss: float, speed: float) -> str:
        """Text with a step's figures, for display."""
        accepted = "".join(f" {float(share):.2f}" for share in self.task.accepted())
        return f"loss {loss:.3f}" + (f"  accepted{accepted}" if accepted else "") + f"  {speed:,.0f} tok/s"

    def _exchange_on(self, last: bool) -> Any:
        if isinstance(self.loss, DistributedDataParallel) and not last:
            return self.loss.no_sync()
        return nullcontext()

    def _checkpoint(self) -> None:
        if self.ranks.is_first:
            self.state.save(self.config.output / STATE_FILE, self.config)
            self.task.export()
            self.curves.draw(self.state)

    def _validate_when_due(self) -> None:
        interval, step = self.task.validation_interval_steps, self.state.step
        if self.ranks.is_first and interval and step and step % interval == 0:
            self._validate()

    def _validate(self) -> None:
        step, done = self.state.step, self.state.validations
        # If this run was resumed from a run that stopped right after measuring this step, the result is already in the
        # state.
        if self.task.validate is not None and not (done and done[-1][0] == step):
            done.append((step, self.task.validate()))
            self.curves.acceptance(*done[-1])
