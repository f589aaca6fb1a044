"""Names of vLLM: what to write instead."""

from wingbeat.deployments.vllm_words.foreign_rows import Write, written
from wingbeat.deployments.vllm_words.speculative_config import PLACE
from wingbeat.deployments.vllm_words.vllm_options import VLLM

_PLACE = "name the drafter: DRAFTER after MODEL, or {drafter}; {draft_steps} is its number of tokens"


def hint(option: str, write: Write = str) -> str | None:
    """What to use in the place of an option that is not here, `--max-cpu-loras` or `max_cpu_loras`; None if unknown.

    Args:
        write: from a setting's name to how it is written where the option was.
    """
    name = option.partition("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    row = VLLM.get(name)
    if row is not None and row.kind != "same":
        return written(row.says, write)
    return written(_PLACE, write) if name == PLACE else None
