"""Settings every training run shares. Validated once, then frozen."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, model_validator

from wingbeat.runtime.recordings.corpus import stdlib_root
from wingbeat.runtime.settings import Settings


class TrainingConfig(Settings):
    """What is common to training a base model and training a drafter.

    Raises:
        pydantic.ValidationError: a field is out of range, names no folder or an unavailable device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        {"output", "steps", "device", "threads", "compile", "resume", "accumulation_steps", "plot", "tensorboard"}
        | {"checkpoint_interval_s", "log_interval_steps"}
    )

    corpus: Path = Field(
        default_factory=stdlib_root,
        description="Folder of text files; the default is this interpreter's standard library.",
    )
    suffixes: tuple[str, ...] = Field((".py",), min_length=1, description="Endings of the corpus files' names.")
    output: Path = Field(description="Folder the weights, their config and metrics.json are written to.")
    steps: int = Field(gt=0, description="Optimizer steps in the whole run, resumed parts included.")
    batch_size: int = Field(gt=0, description="Sequences per step, over all processes and accumulated parts.")
    accumulation_steps: int = Field(
        1, gt=0, description="Parts a process computes its share of a batch in, one after the other, to save memory."
    )
    sequence_length: int = Field(gt=1, description="Tokens per training sequence.")
    learning_rate: float = Field(gt=0, description="Peak learning rate, after warm-up and before the decay.")
    warmup_steps: int = Field(50, ge=0, description="Steps over which the learning rate rises linearly.")
    decay_fraction: float = Field(
        0.4,
        ge=0,
        le=1,
        description="Last part of the run, over which the learning rate falls linearly to zero.",
    )
    seed: int = Field(0, ge=0, description="Seed of the initial weights, of the data order and of sampling.")
    device: str = Field("cpu", description="Torch device to train on: cpu, cuda or cuda:<index>.")
    precision: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Arithmetic of matrix products; weights and optimizer state stay float32."
    )
    threads: int = Field(0, ge=0, description="CPU threads; 0 leaves torch's own choice.")
    compile: bool = Field(False, description="Compile the training step with torch.compile.")
    resume: bool = Field(True, description="Continue from the last checkpoint in `output` when there is one.")
    checkpoint_interval_s: float = Field(120.0, gt=0, description="Seconds between two checkpoints.")
    log_interval_steps: int = Field(20, gt=0, description="Steps between two entries of the loss history.")
    plot: bool = Field(False, description="Draw curves.png at every checkpoint; needs matplotlib.")
    tensorboard: bool = Field(False, description="Write TensorBoard's event files; needs tensorboard.")

    @model_validator(mode="after")
    def _check(self) -> "TrainingConfig":
        if not self.corpus.is_dir():
            raise ValueError(f"corpus={str(self.corpus)!r} is not a folder")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output={str(self.output)!r} exists and is not a folder")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r} is not one of cpu, cuda, cuda:<index>")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}, but torch sees no CUDA device")
        for option, package in (("plot", "matplotlib"), ("tensorboard", "tensorboard")):
            if getattr(self, option) and find_spec(package) is None:
                raise ValueError(f"{option}=true needs {package}: pip install 'wingbeat[train]'")
        return self

    def resume_settings(self) -> dict[str, Any]:
        """The settings a run must share with the checkpoint it continues; the others may change in between."""
        return self.model_dump(mode="json", exclude=set(self.free_on_resume))

    def learning_rate_scale(self, step: int) -> float:
        """Share of the peak learning rate at a step: warm-up, constant, linear decay.

        The constant part does not depend on `steps`, so a run stopped there may be resumed with another length.
        """
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        decay_steps = max(1.0, self.decay_fraction * self.steps)
        return min(warmup, (self.steps - step) / decay_steps, 1.0)
