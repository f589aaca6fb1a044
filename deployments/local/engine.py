"""Opens an engine in the process of a command: model, drafter and limits."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.panel_titles import MEMORY
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config

if TYPE_CHECKING:
    from wingbeat.runtime.llm import LLM

logger = logging.getLogger(__name__)
DEFAULT_MAX_MODEL_LEN = 2048


class LocalConfig(ModelOptions):
    """Settings that commands with an engine in their own process share."""

    model_config = ConfigDict(allow_inf_nan=False)

    max_model_len: int | None = Field(
        None,
        ge=2,
        description=f"Prompt and answer together, in tokens; by default the model's, at most {DEFAULT_MAX_MODEL_LEN}.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Budget of the KV pool; by default, what the sequences that run at once can need at most.",
        json_schema_extra={"panel": MEMORY},
    )

    def engine_config(self, max_num_seqs: int) -> EngineConfig:
        """Return the limits for `max_num_seqs` sequences.

        If a memory budget is set, the number of KV blocks follows from the budget; otherwise the number is the most
        that these sequences can need.
        """
        max_model_len = self.max_model_len or min(_num_positions(self.model_dir()), DEFAULT_MAX_MODEL_LEN)
        limits = self._engine_config(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        # For an engine directory, the maximum length is the length for which the engine was built, and the KV cache has
        # no blocks to count.
        if self.engine_dir is not None or self.kv_cache_memory_bytes is not None:
            return replace(limits, lower_max_model_len=self.max_model_len is None)
        return replace(limits, num_kv_blocks=1 + max_num_seqs * limits.max_blocks_per_seq)

    def llm_arguments(self, max_num_seqs: int) -> dict[str, Any]:
        """Return the arguments of `wingbeat.runtime.llm.LLM`, except for its channel."""
        return {
            "model": self.model_dir(),
            "drafter": self.choice().asked,
            "engine_config": self.engine_config(max_num_seqs),
            "dtype": self.dtype,
            "device": self.resolved_device(),
            "threads": self.num_threads(),
            "allow_bad_drafter": self.allow_bad_drafter,
            "engine_dir": self.engine_dir,
            "fp8_drafter": self.drafter_weights == "fp8",
            "drafter_settings": self.drafter_settings(),
        }


OpenEngine = Callable[[LocalConfig, int], "LLM"]
"""Function that opens an engine for a configuration and a maximum number of concurrent sequences; tests pass a
different function.
"""


def open_engine(config: LocalConfig, max_num_seqs: int) -> "LLM":
    """Load verifier and drafter into this process.

    Raises:
        UserError: a checkpoint or a limit cannot be used.
    """
    from transformers.utils import logging as transformers_logging

    from wingbeat.cluster.channels.channel import InProcessChannel
    from wingbeat.runtime.llm import LLM

    check_device(config.device)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        arguments = config.llm_arguments(max_num_seqs)
        with loading(config):
            return LLM(channel_factory=InProcessChannel, **arguments)
    except (ValueError, OSError) as error:
        raise UserError(str(error).strip().splitlines()[0]) from error


@contextmanager
def loading(config: LocalConfig) -> Iterator[None]:
    """Context manager for the loading of a model: the log gets a line at its beginning. If no log shows the line, it
    stands on the terminal, with the seconds so far.
    """
    text = f"loading the model {config.model or 'of the demo pair'} ({config.shown_load()})"
    logger.info(text)
    console = Console(stderr=True)
    logged = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    told = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
    with Progress(TimeElapsedColumn(), told, console=console, disable=logged or not console.is_terminal) as bar:
        bar.add_task(text[:1].upper() + text[1:], total=None)
        yield


def check_device(device: str) -> None:
    """Raise UserError if a GPU is requested and torch finds none; the message is one line with the reason."""
    import torch

    from wingbeat.cluster.gpu_driver import driver_problem

    if device == "cuda" and not torch.cuda.is_available():
        problem = driver_problem(torch.__version__, torch.version.cuda)
        raise UserError(f"--device cuda: {problem}, or use --device cpu")


def _num_positions(model: Path) -> int:
    text_config = load_config(ConfigFile.read(model)).get_text_config()
    return getattr(text_config, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
