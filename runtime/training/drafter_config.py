"""Settings of a drafter's training. Validated once, then frozen."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from wingbeat.runtime.parts import merged
from wingbeat.runtime.settings import Settings
from wingbeat.runtime.standard_library import stdlib_root

Family = Literal["eagle3", "eagle3.1", "eagle1", "mtp", "dflash", "jetspec", "dspark", "dflash2", "p-eagle"]
_EAGLE = frozenset({"eagle3", "eagle3.1", "eagle1"})
UNROLLED = _EAGLE | {"mtp"}
"""Families that draft a token per pass."""
ONE_PASS = frozenset({"dflash", "jetspec", "dspark", "dflash2", "p-eagle"})
"""Families that draft all their tokens in one pass."""
_OWN_SETTINGS: dict[str, frozenset[str]] = {
    "ttt_steps": UNROLLED,
    "feature_weight": frozenset({"eagle1"}),
    "block_size": ONE_PASS,
    "num_anchors": ONE_PASS,
    "num_layers": ONE_PASS,
    "num_key_value_heads": ONE_PASS,
    "pair_rank": frozenset({"dspark", "dflash2"}),
    "markov_kind": frozenset({"dspark"}),
    "confidence_weight": frozenset({"dspark"}),
    "initial_head": (UNROLLED | ONE_PASS) - {"mtp"},
    "intermediate_size": (UNROLLED | ONE_PASS) - {"mtp"},
    "layout": _EAGLE,
}
"""Settings that some families have, and which; the others refuse them."""


def _torch_sees_cuda() -> bool:
    import torch  # takes seconds, for which no command's help should wait

    return torch.cuda.is_available()


class TrainDrafterConfig(Settings):
    """Settings of `train_drafter`; the defaults suit a small verifier, the demo's in particular.

    Raises:
        pydantic.ValidationError: a field is out of range, names no folder or an unavailable device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        {"output", "steps", "device", "threads", "resume", "accumulation_steps", "plot", "tensorboard"}
        | {"checkpoint_interval_s", "log_interval_steps", "layout", "validation_interval_steps", "validation_prompts"}
    )

    verifier: str = Field(description="Folder or hub name of the causal LM the head drafts for.")
    family: Family = Field(
        "eagle3",
        description="Kind of head: eagle3.1 norms the taps and feeds the normed state back; eagle1 predicts the "
        "verifier's last hidden state; mtp is a prediction module for the verifier's own checkpoint. These two draft "
        "the whole vocabulary. dflash, jetspec, dspark, dflash2 and p-eagle draft a block of tokens in one pass.",
    )
    recordings: Path | None = Field(
        None,
        description="Folder of a recording to learn from, as `wingbeat extract` writes it; without it the verifier "
        "runs beside the training.",
    )
    corpus: Path = Field(
        default_factory=stdlib_root,
        description="Folder of text files; the default is this interpreter's standard library.",
    )
    suffixes: tuple[str, ...] = Field((".py",), min_length=1, description="Endings of the corpus files' names.")
    output: Path = Field(description="Folder the weights, their config and metrics.json are written to.")
    steps: int = Field(2000, gt=0, description="Optimizer steps in the whole run, resumed parts included.")
    batch_size: int = Field(8, gt=0, description="Sequences per step, over all processes and accumulated parts.")
    accumulation_steps: int = Field(
        1, gt=0, description="Parts a process computes its share of a batch in, one after the other, to save memory."
    )
    sequence_length: int = Field(256, gt=8, description="Tokens per training sequence.")
    learning_rate: float = Field(4e-3, gt=0, description="Peak learning rate, after warm-up and before the decay.")
    warmup_steps: int = Field(50, ge=0, description="Steps over which the learning rate rises linearly.")
    decay_fraction: float = Field(
        0.4,
        ge=0,
        le=1,
        description="Last part of the run, over which the learning rate falls linearly to zero.",
    )
    seed: int = Field(0, ge=0, description="Seed of the initial weights, of the data order and of sampling.")
    ttt_steps: int = Field(6, ge=1, le=16, description="EAGLE and mtp: length of the chains the head is unrolled over.")
    step_decay: float = Field(
        0.9, gt=0, le=1, description="Weight of a drafted token's loss relative to that of the token before."
    )
    block_size: int = Field(
        8,
        ge=2,
        le=256,
        description="One-pass heads: slots of a block. dspark and p-eagle draft as many tokens, the others one less.",
    )
    num_anchors: int = Field(
        32, gt=0, description="One-pass heads: blocks per sequence, which begin at tokens drawn at random."
    )
    num_layers: int = Field(
        2, gt=0, le=64, description="One-pass heads: decoder layers; published ones have 4 (p-eagle) or 5."
    )
    num_key_value_heads: int | None = Field(
        None,
        gt=0,
        description="One-pass heads: heads of keys and values, through which all that is known of the text comes; by "
        "default as many as there are query heads.",
    )
    pair_rank: int = Field(
        64,
        ge=0,
        description="dspark and dflash2: rank of what a drafted token adds to the scores of the next one; published "
        "heads have 256. 0 leaves it out of dspark.",
    )
    markov_kind: Literal["vanilla", "gated", "rnn"] = Field(
        "vanilla", description="dspark: whether what the token before adds depends on the slot, or on all before."
    )
    confidence_weight: float = Field(
        1.0, ge=0, description="dspark: weight of the loss of the confidence head; 0 trains none."
    )
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
    device: str = Field("cpu", description="Torch device to train on: cpu, cuda or cuda:<index>.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Arithmetic of matrix products: auto is bfloat16 where the device has units for it. Weights and "
        "optimizer state stay float32.",
    )
    threads: int = Field(0, ge=0, description="CPU threads; 0 leaves torch's own choice.")
    resume: bool = Field(True, description="Continue from the last checkpoint in `output` when there is one.")
    checkpoint_interval_s: float = Field(120.0, gt=0, description="Seconds between two checkpoints.")
    log_interval_steps: int = Field(20, gt=0, description="Steps between two entries of the loss history.")
    plot: bool = Field(False, description="Draw curves.png at every checkpoint; needs matplotlib.")
    tensorboard: bool = Field(False, description="Write TensorBoard's event files; needs tensorboard.")

    @model_validator(mode="after")
    def _check(self) -> "TrainDrafterConfig":
        if not self.corpus.is_dir():
            raise ValueError(f"corpus={str(self.corpus)!r} is not a folder")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output={str(self.output)!r} exists and is not a folder")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r} is not one of cpu, cuda, cuda:<index>")
        if self.device != "cpu" and not _torch_sees_cuda():
            raise ValueError(f"device={self.device!r}, but torch sees no CUDA device")
        for option, package in (("plot", "matplotlib"), ("tensorboard", "tensorboard")):
            if getattr(self, option) and find_spec(package) is None:
                raise ValueError(f"{option}=true needs {package}: pip install 'wingbeat[train]'")
        return self

    @model_validator(mode="after")
    def _check_drafter(self) -> "TrainDrafterConfig":
        if self.family not in (*_EAGLE, *merged("trained_families")):
            raise ValueError(f"family={self.family!r}: nothing that is installed trains it")
        for name, families in _OWN_SETTINGS.items():
            value = getattr(self, name)
            if self.family not in families and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={str(value)!r}: family={self.family!r} has none")
        drafted, name = (self.ttt_steps, "ttt_steps") if self.family in UNROLLED else (self.block_size, "block_size")
        if self.sequence_length <= drafted + 1:
            raise ValueError(f"sequence_length={self.sequence_length} leaves no chain of {name}={drafted}")
        if self.family == "dflash2" and not self.pair_rank:
            raise ValueError("pair_rank=0: family='dflash2' without it is family='dflash'")
        if self.family == "dspark" and not self.pair_rank and self.markov_kind != "vanilla":
            raise ValueError(f"markov_kind={self.markov_kind!r} needs a pair_rank above 0")
        if self.recordings is not None and not self.recordings.is_dir():
            raise ValueError(f"recordings={str(self.recordings)!r} is not a folder")
        if self.family == "mtp" and self.output.resolve() == Path(self.verifier).resolve():
            raise ValueError(f"output={str(self.output)!r} is the verifier's folder: give another one")
        if self.family in ("eagle1", "mtp") and self.tap_layers is not None:
            raise ValueError(f"tap_layers={self.tap_layers}: {self.family} has one tap, the final norm's output")
        if self.layout is not None and (self.layout == "safeailab") != (self.family == "eagle1"):
            raise ValueError(f"layout={self.layout!r} does not hold heads of family={self.family!r}")
        if self.tap_layers is not None and list(self.tap_layers) != sorted(set(self.tap_layers)):
            raise ValueError(f"tap_layers={self.tap_layers} are not ascending")
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
