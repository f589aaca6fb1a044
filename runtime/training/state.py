"""State of a training run on disk: weights, optimizers, random state and history; written atomically."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from wingbeat.runtime.recordings.format import write_atomically
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.evaluation import HeadAcceptance

STATE_FILE = "training_state.pt"


class TrainingState:
    """Progress of a run; `step` is the next step to run."""

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.validations: list[tuple[int, HeadAcceptance]] = []
        self.num_tokens = 0
        self.seconds = 0.0

    def record(self, loss: float, num_tokens: int, seconds: float, log_interval_steps: int) -> bool:
        """Count a step; returns whether its loss was added to the history."""
        logged = self.step % log_interval_steps == 0
        if logged:
            self.losses.append((self.step, loss))
        self.step += 1
        self.num_tokens += num_tokens
        self.seconds = seconds
        return logged

    def save(self, path: Path, config: TrainDrafterConfig, own: dict[str, Any] | None = None) -> None:
        """Write the state to `path` atomically; `own` is additional state of the caller."""
        state = {
            "settings": config.resume_settings(),
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "random": torch.get_rng_state(),
            "step": self.step,
            "losses": self.losses,
            "validations": [(step, acceptance._asdict()) for step, acceptance in self.validations],
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "own": own or {},
        }
        write_atomically(path, lambda temporary: torch.save(state, temporary))

    def load(self, path: Path, config: TrainDrafterConfig, device: torch.device) -> dict[str, Any]:
        """Restore the state from `path`; returns the caller's additional state.

        Raises:
            ValueError: the file was written by a run with other settings.
        """
        state = torch.load(path, map_location=device, weights_only=True)
        changed = sorted(k for k, v in config.resume_settings().items() if state["settings"].get(k) != v)
        if changed:
            raise ValueError(f"{path} was made with another {', '.join(changed)}; use resume=False to start over")
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["random"].cpu())
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        self.losses, self.seconds = state["losses"], state["seconds"]
        self.validations = [(step, HeadAcceptance(**acceptance)) for step, acceptance in state["validations"]]
        return state.get("own", {})
