"""Hints for options of vLLM that a command does not have."""

from wingbeat.deployments.vllm_words.foreign_rows import Write, written
from wingbeat.deployments.vllm_words.speculative_config import PLACE
from wingbeat.deployments.vllm_words.vllm_options import VLLM

_PLACE = "name the drafter: DRAFTER after MODEL, or {drafter}; {draft_steps} is its draft depth in tokens"


def hint(option: str, write: Write = str) -> str | None:
    """Returns advice on what to use instead of an option that a command does not have; None if vLLM does not have this
    option either.

    Args:
        option: the option as the user wrote it, for example `--max-cpu-loras` or `max_cpu_loras`.
        write: returns the spelling of a setting's name in the hint.
    """
    name = option.partition("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    row = VLLM.get(name)
    if row is not None and row.kind != "same":
        return written(row.description, write)
    return written(_PLACE, write) if name == PLACE else None
