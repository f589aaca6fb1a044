"""A verifier and its drafter in this process, by the settings of `wingbeat generate`: `wingbeat.LLM`."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.cli.local import LocalConfig
from wingbeat.deployments.options.problems import SettingsError, first_problem
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
        try:
            config = LocalConfig(model=model, drafter=str(drafter), **settings)
        except ValidationError as error:
            raise SettingsError(first_problem(error, LocalConfig)) from None
        super().__init__(channel_factory=InProcessChannel, **config.llm_arguments(max_num_seqs))
