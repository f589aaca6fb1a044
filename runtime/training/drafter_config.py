"""Settings of a drafter training run; validated once, then frozen."""

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
"""Families that draft one token per pass."""
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
"""Maps a setting to the families that have the setting; if the setting is given for another family, an error is
raised.
"""


def _torch_sees_cuda() -> bool:
    import torch  # imported here because the import takes seconds, for which `--help` should not wait

    return torch.cuda.is_available()


class TrainDrafterConfig(Settings):
    """Settings of `train_drafter`; the defaults suit a small verifier such as the demo's.

    Raises:
        pydantic.ValidationError: a field is out of range, or names a missing folder or an unavailable device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        {"output", "steps", "device", "threads", "resume", "accumulation_steps", "plot", "tensorboard"}
        | {"checkpoint_interval_s", "log_interval_steps", "layout", "validation_interval_steps", "validation_prompts"}
    )

    verifier: str = Field(description="Folder or hub name of the causal LM the head drafts for.")
    family: Family = Field(
        "eagle3",
        description="Kind of head: eagle3.1 normalises taps and feeds the normalised state back; eagle1 predicts the "
        "verifier's last hidden state; mtp is a prediction module for the verifier's own checkpoint. eagle1 and mtp "
        "draft the whole vocabulary. dflash, jetspec, dspark, dflash2 and p-eagle draft a block in one pass.",
    )
    recordings: Path | None = Field(
        None,
        description="Folder of a recording to train on, written by `wingbeat extract`; without it the verifier "
        "runs during the training.",
    )
    corpus: Path = Field(
        default_factory=stdlib_root,
        description="Folder of text files; the default is this interpreter's standard library.",
    )
    suffixes: tuple[str, ...] = Field((".py",), min_length=1, description="Endings of the corpus files' names.")
    output: Path = Field(description="Folder to write weights, config and metrics.json to.")
    steps: int = Field(2000, gt=0, description="Optimizer steps of the whole run, including resumed parts.")
    batch_size: int = Field(8, gt=0, description="Sequences per step, over all processes and accumulated parts.")
    accumulation_steps: int = Field(
        1,
        gt=0,
        description="Parts in which a process computes its share of a batch, one after another, to save memory.",
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
        description="One-pass heads: slots per block. dspark and p-eagle draft a token per slot, the others one less.",
    )
    num_anchors: int = Field(
        32, gt=0, description="One-pass heads: blocks per sequence, starting at randomly drawn tokens."
    )
    num_layers: int = Field(
        2, gt=0, le=64, description="One-pass heads: decoder layers; published ones have 4 (p-eagle) or 5."
    )
    num_key_value_heads: int | None = Field(
        None,
        gt=0,
        description="One-pass heads: key-value heads, which carry all information about the context; by default as "
        "many as query heads.",
    )
    pair_rank: int = Field(
        64,
        ge=0,
        description="dspark and dflash2: rank of the correction that a drafted token adds to the next token's scores; "
        "published heads have 256. 0 disables it in dspark.",
    )
    markov_kind: Literal["vanilla", "gated", "rnn"] = Field(
        "vanilla", description="dspark: correction by the previous token alone, gated by the slot, or recurrent (rnn)."
    )
    confidence_weight: float = Field(
        1.0, ge=0, description="dspark: weight of the loss of the confidence head; 0 trains none."
    )
    feature_weight: float = Field(
        10.0,
        ge=0,
        description="eagle1: weight of the distance to the verifier's states, relative to 1 for distillation.",
    )
    tap_layers: tuple[int, ...] | None = Field(
        None,
        description="Layers whose input is tapped; by default the recording's, else (2, n // 2, n - 3) of n layers, "
        "adapted for shallow models. Not for eagle1 and mtp.",
    )
    initial_head: Path | None = Field(
        None, description="Folder of a head to start from, for example one for an earlier version of the verifier."
    )
    intermediate_size: int | None = Field(None, gt=0, description="Width of the head's MLP; by default the verifier's.")
    draft_vocab_size: int = Field(
        32000,
        gt=0,
        description="Number of tokens that the head can draft, the most frequent ones; capped at the verifier's.",
    )
    rollout_rows: int = Field(
        4096,
        ge=0,
        description="Without recordings: sequences that the verifier generates first as training text; 0 trains on the "
        "corpus alone.",
    )
    rollout_share: float = Field(0.75, ge=0, le=1, description="Share of generated text in a batch.")
    greedy_fraction: float = Field(0.75, ge=0, le=1, description="Share of the generated text that is greedy.")
    temperature: float = Field(0.8, gt=0, description="Sampling temperature of the generated text that is not greedy.")
    validation_interval_steps: int = Field(
        0, ge=0, description="Steps between measurements of acceptance by the engine; 0 measures only at the end."
    )
    validation_prompts: int = Field(
        64, ge=0, description="Held-out prompts per measurement, 128 new tokens each; 0 disables measurements."
    )
    layout: Literal["specforge", "speculators", "safeailab"] | None = Field(
        None,
        description="Format of the result: specforge by default, for eagle1 always safeailab; mtp modules are written "
        "in DeepSeek's.",
    )
    device: str = Field("cpu", description="Torch device to train on: cpu, cuda or cuda:<index>.")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Arithmetic of matrix products: auto is bfloat16 if the hardware supports it, else float32. "
        "Weights and optimizer state are float32.",
    )
    threads: int = Field(0, ge=0, description="CPU threads; 0 keeps torch's default.")
    resume: bool = Field(True, description="Continue from the last checkpoint in `output`, if there is one.")
    checkpoint_interval_s: float = Field(120.0, gt=0, description="Seconds between checkpoints.")
    log_interval_steps: int = Field(20, gt=0, description="Steps between entries of the loss history.")
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
            raise ValueError(f"family={self.family!r}: no installed part trains it")
        for name, families in _OWN_SETTINGS.items():
            value = getattr(self, name)
            if self.family not in families and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={str(value)!r}: family={self.family!r} does not have this setting")
        drafted, name = (self.ttt_steps, "ttt_steps") if self.family in UNROLLED else (self.block_size, "block_size")
        if self.sequence_length <= drafted + 1:
            raise ValueError(f"sequence_length={self.sequence_length} is too short for a chain of {name}={drafted}")
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
        """The settings in which a resumed run must equal the run that wrote the checkpoint; all other settings may
        change.
        """
        return self.model_dump(mode="json", exclude=set(self.free_on_resume))

    def learning_rate_scale(self, step: int) -> float:
        """Learning rate at a step as a share of the peak: warm-up, constant, linear decay.

        During the constant phase the rate does not depend on `steps`, so a run that stops in this phase may be resumed
        with another value of `steps`.
        """
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        decay_steps = max(1.0, self.decay_fraction * self.steps)
        return min(warmup, (self.steps - step) / decay_steps, 1.0)
