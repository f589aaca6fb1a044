"""A verifier and its drafter in this process, by the settings of `wingbeat generate`: `wingbeat.LLM`."""

from pathlib import Path
from typing import Any

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.cli.local import LocalConfig
from wingbeat.runtime import llm


class LLM(llm.LLM):
    """`wingbeat.runtime.llm.LLM` with everything chosen that `wingbeat generate` chooses.

    Args:
        model: folder of a Hugging Face causal LM, or its name on the hub; None is the demo pair's.
        drafter: as the setting `drafter`.
        max_num_seqs: prompts that run at once.
        settings: others of `wingbeat generate`, such as `max_model_len` and `dtype`.

    Raises:
        ValueError, FileNotFoundError: the model, the drafter or a setting cannot be used; one line that says why.
    """

    def __init__(
        self, model: str | Path | None = None, drafter: str | Path = "auto", max_num_seqs: int = 16, **settings: Any
    ) -> None:
        config = LocalConfig(model=model, drafter=str(drafter), **settings)
        super().__init__(
            config.model_dir(),
            config.choice().source,
            config.engine_config(max_num_seqs),
            InProcessChannel,
            dtype=config.dtype,
            device=config.resolved_device(),
            threads=config.threads,
            allow_bad_drafter=config.allow_bad_drafter,
            engine_dir=config.engine_dir,
            fp8_drafter=config.drafter_weights == "fp8",
        )
