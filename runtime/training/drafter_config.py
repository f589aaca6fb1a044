"""Settings of a drafter's training."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from wingbeat.runtime.training.run_config import TrainingConfig


class TrainDrafterConfig(TrainingConfig):
    """Settings of `train_drafter`; the defaults suit a small verifier, the demo's in particular."""

    free_on_resume: ClassVar[frozenset[str]] = TrainingConfig.free_on_resume | {
        "layout",
        "validation_interval_steps",
        "validation_prompts",
    }

    verifier: str = Field(description="Folder or hub name of the causal LM the head drafts for.")
    family: Literal["eagle3", "eagle3.1", "eagle1", "mtp"] = Field(
        "eagle3",
        description="Kind of head: eagle3.1 norms the taps and feeds the normed state back; eagle1 predicts the "
        "verifier's last hidden state; mtp is a prediction module for the verifier's own checkpoint. These two draft "
        "the whole vocabulary.",
    )
    recordings: Path | None = Field(
        None,
        description="Folder of a recording to learn from, as `wingbeat extract` writes it; without it the verifier "
        "runs beside the training.",
    )
    steps: int = Field(2000, gt=0, description="Optimizer steps in the whole run, resumed parts included.")
    batch_size: int = Field(8, gt=0, description="Sequences per step, over all processes and accumulated parts.")
    sequence_length: int = Field(256, gt=8, description="Tokens per training sequence.")
    learning_rate: float = Field(4e-3, gt=0, description="Peak learning rate, after warm-up and before the decay.")
    ttt_steps: int = Field(6, ge=1, le=16, description="Length of the chains the head is unrolled over.")
    step_decay: float = Field(0.9, gt=0, le=1, description="Weight of a chain's step relative to the one before.")
    feature_weight: float = Field(
        10.0,
        ge=0,
        description="eagle1: weight of the distance to the verifier's states, beside 1 of distillation.",
    )
    tap_layers: tuple[int, ...] | None = Field(
        None,
        description="Layers whose input is tapped; by default the recording's, else (2, n // 2, n - 3), spread out for "
        "shallow models. eagle1 and mtp have their own.",
    )
    initial_head: Path | None = Field(
        None, description="Folder of a head to start from, for instance that of an earlier version of the verifier."
    )
    intermediate_size: int | None = Field(None, gt=0, description="Width of the head's MLP; by default the verifier's.")
    draft_vocab_size: int = Field(
        32000, gt=0, description="Most frequent tokens the head can draft; at most the verifier's vocabulary."
    )
    rollout_rows: int = Field(
        4096,
        ge=0,
        description="Without recordings: sequences the verifier writes first, as training text; 0 trains on the corpus "
        "alone.",
    )
    rollout_share: float = Field(0.75, ge=0, le=1, description="Share of the verifier's own text in a batch.")
    greedy_fraction: float = Field(0.75, ge=0, le=1, description="Share of the verifier's text written greedily.")
    temperature: float = Field(0.8, gt=0, description="Temperature of the rest.")
    validation_interval_steps: int = Field(
        0, ge=0, description="Steps between two measurements of acceptance by the engine; 0 measures at the end alone."
    )
    validation_prompts: int = Field(
        64, ge=0, description="Held-out prompts of a measurement, 128 new tokens each; 0 measures nothing."
    )
    layout: Literal["specforge", "speculators", "safeailab"] | None = Field(
        None,
        description="Tensor names and config of the result: specforge by default, for eagle1 safeailab alone; mtp "
        "modules have DeepSeek's",
    )

    @model_validator(mode="after")
    def _check_drafter(self) -> "TrainDrafterConfig":
        if self.sequence_length <= self.ttt_steps + 1:
            raise ValueError(f"sequence_length={self.sequence_length} leaves no chain of ttt_steps={self.ttt_steps}")
        if self.recordings is not None and not self.recordings.is_dir():
            raise ValueError(f"recordings={str(self.recordings)!r} is not a folder")
        if self.family in ("eagle1", "mtp") and self.tap_layers is not None:
            raise ValueError(f"tap_layers={self.tap_layers}: {self.family} has one tap, the final norm's output")
        if self.family == "mtp":
            for name in ("initial_head", "intermediate_size", "layout"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={str(getattr(self, name))!r}: family='mtp' has none")
            if self.output.resolve() == Path(self.verifier).resolve():
                raise ValueError(f"output={str(self.output)!r} is the verifier's folder: give another one")
        wrong_layout = self.layout is not None and (self.layout == "safeailab") != (self.family == "eagle1")
        if wrong_layout and self.family != "mtp":
            raise ValueError(f"layout={self.layout!r} does not hold heads of family={self.family!r}")
        if self.tap_layers is not None and list(self.tap_layers) != sorted(set(self.tap_layers)):
            raise ValueError(f"tap_layers={self.tap_layers} are not ascending")
        return self
