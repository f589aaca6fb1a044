"""An engine in this process for the command line: which model, which drafter, which limits."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from wingbeat.deployments.cli.options import UserError
from wingbeat.runtime.config import TREE_FIELDS, EngineConfig, SpeculationConfig, default_by_device
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.choice import parse_drafter

if TYPE_CHECKING:
    from wingbeat.runtime.llm import LLM

DEFAULT_MAX_MODEL_LEN = 2048


class LocalConfig(BaseModel):
    """What the in-process commands share.

    Raises:
        pydantic.ValidationError: a field is out of range or names a folder that is not there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    model: Path | None = Field(None, description="Folder of a Hugging Face checkpoint; without it the demo pair.")
    drafter: str = Field(
        "auto",
        description="Folder of an EAGLE head or a draft model, mtp, suffix, ngram, none, the import path of a class, "
        "or auto: the demo's head for the demo, else mtp where the model's checkpoint has it, else ngram.",
    )
    allow_bad_drafter: bool = Field(False, description="Use a drafter that fails its self-test, with a warning.")
    draft_steps: int | None = Field(
        None, ge=1, description=f"Most levels of a draft tree below its root; {default_by_device('draft_steps')}."
    )
    draft_top_k: int | None = Field(
        None, ge=1, description=f"Children per expanded node, 1 drafts a chain; {default_by_device('draft_top_k')}."
    )
    verify_tree_size: int | None = Field(
        None,
        ge=2,
        description=f"Most nodes verified per round, root included; {default_by_device('verify_tree_size')}.",
    )
    adaptive: bool | None = Field(None, description="Let costs and acceptance decide depth and nodes; by default true.")
    max_model_len: int | None = Field(
        None,
        ge=2,
        description=f"Prompt and answer together, in tokens; by default the model's, at most {DEFAULT_MAX_MODEL_LEN}.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and KV; 'auto' is bfloat16 on GPUs, float32 on CPUs."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where both models run.")
    compile: bool = Field(False, description="Run the models through torch.compile: slow start, faster rounds.")
    threads: int = Field(1, ge=1, description="Torch CPU threads.")

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ValueError(f"--model {self.model}: no config.json there; give a Hugging Face checkpoint's folder")
        parse_drafter(self.drafter, self.model)
        return self

    def folders(self) -> tuple[Path, str | Path]:
        """The verifier's folder, and what `load_drafter` takes, `auto` resolved.

        Raises:
            FileNotFoundError: the demo is asked for and not there.
        """
        return self.model or demo_pair().verifier, parse_drafter(self.drafter, self.model).source

    def _resolved_device(self) -> str:
        import torch

        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    def engine_config(self, model: Path, max_num_seqs: int) -> EngineConfig:
        """Limits for `max_num_seqs` sequences, with exactly the KV blocks they can need."""
        given = {name: value for name in TREE_FIELDS if (value := getattr(self, name)) is not None}
        speculation = SpeculationConfig.default(self._resolved_device(), **given)
        max_model_len = self.max_model_len or min(_num_positions(model), DEFAULT_MAX_MODEL_LEN)
        limits = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len, speculation=speculation)
        num_kv_blocks = 1 + max_num_seqs * limits.max_blocks_per_seq
        return EngineConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_kv_blocks=num_kv_blocks,
            speculation=speculation,
        )


OpenEngine = Callable[[LocalConfig, int], "LLM"]
"""From the configuration and the number of sequences to run at once to an engine; tests put in their own."""


def open_engine(config: LocalConfig, max_num_seqs: int) -> "LLM":
    """Load verifier and drafter.

    Raises:
        UserError: a checkpoint or a limit cannot be used.
    """
    import torch
    import transformers

    from wingbeat.cluster.channels.channel import InProcessChannel
    from wingbeat.runtime.llm import LLM

    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; use --device cpu")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    options = {"compile": True} if config.compile else {}
    try:
        model, drafter = config.folders()
        engine_config = config.engine_config(model, max_num_seqs)
        return LLM(
            model,
            drafter,
            engine_config,
            InProcessChannel,
            dtype=config.dtype,
            device=config.device,
            threads=config.threads,
            allow_bad_drafter=config.allow_bad_drafter,
            **options,
        )
    except (ValueError, OSError) as error:
        raise UserError(str(error).strip().splitlines()[0]) from error


def _num_positions(model: Path) -> int:
    from transformers import AutoConfig

    text_config = AutoConfig.from_pretrained(model).get_text_config()
    return getattr(text_config, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
