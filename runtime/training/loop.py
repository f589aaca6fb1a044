"""The optimizer loop both trainers run: schedule, step, progress, checkpoints that survive SIGKILL.

Does not know what is trained: a `Task` gives the loss of a step.
"""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn

from wingbeat.runtime.training.config import TrainingConfig

STATE_FILE = "training_state.pt"
METRICS_FILE = "metrics.json"
_GRADIENT_NORM = 1.0


class StepResult(NamedTuple):
    """Loss of one step, with its graph, and the tokens it was computed from."""

    loss: Tensor
    num_tokens: int


class History(NamedTuple):
    """What a finished run leaves for the metrics file."""

    losses: list[tuple[int, float]]
    num_tokens: int
    seconds: float


def build_optimizers(model: nn.Module, learning_rate: float, weight_decay: float = 0.05) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, the output head, biases and norms.

    Muon's steps are scaled to the RMS of AdamW's, so that one learning rate serves both.
    Source: K. Jordan, "Muon: an optimizer for hidden layers" (2024); the scale is from Moonlight (arXiv 2502.16982).
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_matrix = {name: p.ndim == 2 and "embed" not in name and "lm_head" not in name for name, p in trained.items()}
    matrices = [p for name, p in trained.items() if is_matrix[name]]
    others = [p for name, p in trained.items() if not is_matrix[name]]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    return optimizers


def autocast(config: TrainingConfig) -> Any:
    """The context matrix products run in: bfloat16 autocast, or nothing for float32."""
    if config.precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16)


def prepare(config: TrainingConfig) -> None:
    """Set thread count and seeds, and make the output folder."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    config.output.mkdir(parents=True, exist_ok=True)


def optimize(
    config: TrainingConfig,
    model: nn.Module,
    step_loss: Callable[[int], StepResult],
    on_checkpoint: Callable[[], None],
) -> History:
    """Run the steps left of `config.steps`; checkpoint at intervals; remove the checkpoint's state at the end.

    Args:
        step_loss: loss of a step number; must depend on the number and the weights alone.
        on_checkpoint: called after each checkpoint, to export the weights.

    Raises:
        FloatingPointError: the loss is not finite.
        ValueError: the checkpoint to resume was made with other settings.
    """
    optimizers = build_optimizers(model, config.learning_rate)
    state_path = config.output / STATE_FILE
    state = _Progress(model, optimizers)
    if config.resume and state_path.exists():
        state.load(state_path, config)
    saved_at = started_at = time.monotonic()
    seconds_before = state.seconds
    with _progress_bar() as bar:
        task = bar.add_task("train", total=config.steps, completed=state.step, loss=float("nan"), speed=0.0)
        while state.step < config.steps:
            before = time.monotonic()
            num_tokens, loss = _take_step(config, model, optimizers, step_loss, state.step)
            now = time.monotonic()
            state.record(loss, num_tokens, seconds_before + now - started_at, config.log_interval_steps)
            bar.update(task, advance=1, loss=loss, speed=num_tokens / (now - before))
            if now - saved_at >= config.checkpoint_interval_s and state.step < config.steps:
                state.save(state_path, config)
                on_checkpoint()
                saved_at = time.monotonic()
    on_checkpoint()
    state_path.unlink(missing_ok=True)
    return History(state.losses, state.num_tokens, state.seconds)


def write_metrics(config: TrainingConfig, history: History, **extra: Any) -> None:
    """Write metrics.json beside the weights: settings, loss history, speed and what the caller adds."""
    metrics = {
        "settings": config.model_dump(mode="json", exclude={"corpus", "output"}),
        "torch": torch.__version__,
        "num_tokens": history.num_tokens,
        "seconds": round(history.seconds, 1),
        **extra,
        "losses": [[step, round(loss, 4)] for step, loss in history.losses],
    }
    text = json.dumps(metrics, indent=1).replace("\n   ", " ").replace("\n  ]", "]")
    _write_atomically(config.output / METRICS_FILE, lambda path: path.write_text(text + "\n"))


def _take_step(
    config: TrainingConfig,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step_loss: Callable[[int], StepResult],
    step: int,
) -> tuple[int, float]:
    rate = config.learning_rate * config.learning_rate_scale(step)
    with autocast(config):
        result = step_loss(step)
    loss = float(result.loss.detach())
    if not math.isfinite(loss):
        raise FloatingPointError(f"loss is {loss} at step {step}")
    result.loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return result.num_tokens, loss


class _Progress:
    """Everything a resumed run needs: weights, optimizer state, random state, step and loss history."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.num_tokens = 0
        self.seconds = 0.0

    def record(self, loss: float, num_tokens: int, seconds: float, log_interval_steps: int) -> None:
        if self.step % log_interval_steps == 0:
            self.losses.append((self.step, loss))
        self.step += 1
        self.num_tokens += num_tokens
        self.seconds = seconds

    def save(self, path: Path, config: TrainingConfig) -> None:
        state = {
            "settings": config.resume_settings(),
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "random": torch.get_rng_state(),
            "step": self.step,
            "losses": self.losses,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
        }
        _write_atomically(path, lambda temporary: torch.save(state, temporary))

    def load(self, path: Path, config: TrainingConfig) -> None:
        state = torch.load(path, map_location=config.device, weights_only=True)
        changed = sorted(k for k, v in config.resume_settings().items() if state["settings"].get(k) != v)
        if changed:
            raise ValueError(f"{path} was made with another {', '.join(changed)}; use resume=False to start anew")
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["random"].cpu())
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        self.losses, self.seconds = state["losses"], state["seconds"]


def _write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    # A kill at any moment leaves either the old file or the new one, never a torn one.
    temporary = path.with_suffix(path.suffix + ".tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tok/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
