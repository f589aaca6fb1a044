"""Settings of `wingbeat extract`, validated once, then frozen. Does not import torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from wingbeat.runtime.config import FloatName
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.folder_kinds import folder_problem
from wingbeat.runtime.hub import HubName, checkpoint_folder
from wingbeat.runtime.scheduling.request import MAX_LOGPROBS
from wingbeat.runtime.settings import Settings
from wingbeat.runtime.standard_library import stdlib_root

MIN_ANSWER = 16
"""Minimum number of tokens that must be left for an answer; prompts that leave fewer are skipped."""


class ExtractConfig(Settings):
    """Settings of `extract`.

    Raises:
        pydantic.ValidationError: a field is out of range, or names a missing folder, file or device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Path | None = Field(None, description="Folder of the verifier's checkpoint; default: the demo's.")
    output: Path = Field(description="Folder of the recording; an existing recording is continued.")
    corpus: Path = Field(
        default_factory=stdlib_root,
        description="Folder of text files; the default is this interpreter's standard library.",
    )
    suffixes: tuple[str, ...] = Field((".py",), min_length=1, description="Endings of the corpus files' names.")
    prompts: Path | None = Field(
        None, description='JSON Lines file of {"prompt": text} or {"messages": [...]} to answer, in place of a corpus.'
    )
    sequences: int = Field(4096, gt=0, description="Sequences to record; with prompts, at most.")
    sequence_length: int = Field(256, gt=8, description="Tokens per sequence; with prompts, at most.")
    own_share: float = Field(
        0.75,
        ge=0,
        le=1,
        description="Share of the corpus sequences of which the verifier writes all but the beginning.",
    )
    greedy_fraction: float = Field(0.75, ge=0, le=1, description="Share of the verifier's text written greedily.")
    temperature: float = Field(0.8, gt=0, le=100, description="Temperature of text that is not written greedily.")
    tap_layers: tuple[int, ...] | None = Field(
        None,
        description="Layers whose input is tapped, the number of layers standing for the final norm's output; by "
        "default (2, n // 2, n - 3), spread out for shallow models.",
    )
    top_k: int = Field(
        MAX_LOGPROBS, ge=0, le=MAX_LOGPROBS, description="Log-probabilities kept per token; 0 keeps none."
    )
    taps_dtype: FloatName = Field("bfloat16", description="Data type of the stored hidden states.")
    dtype: FloatName = Field("float32", description="Data type of the verifier's arithmetic and of the stored logits.")
    batch_size: int = Field(64, gt=0, description="Sequences the verifier continues at once.")
    shard_bytes: int = Field(32 * 2**20, gt=0, description="Approximate bytes of a shard.")
    shard_interval_s: float = Field(300.0, gt=0, description="Seconds until a shard is written, full or not.")
    max_bytes: int = Field(
        20 * 10**9, gt=0, description="Most bytes of all shards; the run stops before exceeding them."
    )
    seed: int = Field(0, ge=0, description="Seed of the data order and of sampling.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the verifier runs.")
    threads: int = Field(0, ge=0, description="Torch CPU threads; 0 leaves torch's own choice.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = self.model is None or HubName.parse(self.model) is not None
        if not named and (problem := folder_problem(self.model)) is not None:
            raise ValueError(f"model={str(self.model)!r}: {problem}; it must be a folder with a config.json")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output={str(self.output)!r} exists and is not a folder")
        if self.prompts is not None and not self.prompts.is_file():
            raise ValueError(f"prompts={str(self.prompts)!r} is not a file")
        if self.prompts is not None and self.sequence_length <= MIN_ANSWER:
            raise ValueError(f"sequence_length={self.sequence_length} leaves answers fewer than {MIN_ANSWER} tokens")
        if self.prompts is None and not self.corpus.is_dir():
            raise ValueError(f"corpus={str(self.corpus)!r} is not a folder")
        if self.device == "cuda":
            import torch  # imported here because the import takes seconds, for which a command's help should not wait

            if not torch.cuda.is_available():
                raise ValueError("device='cuda', but torch sees no CUDA device; use cpu")
        return self

    def model_folder(self) -> Path:
        """Folder of the verifier's checkpoint.

        Raises:
            FileNotFoundError: the demo's verifier is used, but does not exist.
            HubError: the model is a name on the hub and cannot be downloaded.
        """
        return demo_pair().verifier if self.model is None else checkpoint_folder(self.model)
