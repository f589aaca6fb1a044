"""Hints for options of vLLM that a command does not have."""

from collections.abc import Collection

from wingbeat.deployments.vllm_words.foreign_rows import Write, settings_named, written
from wingbeat.deployments.vllm_words.speculative_config import PLACE
from wingbeat.deployments.vllm_words.vllm_options import VLLM

_PLACE = "name the drafter with {drafter}; {draft_steps} is its draft depth in tokens"
_SERVE = "only wingbeat serve has"


def hint(option: str, own: Collection[str], write: Write = str) -> str | None:
    """Returns advice on what to use instead of an option that a command does not have; None if vLLM does not have this
    option either.

    Args:
        option: the option as the user wrote it, for example `--max-cpu-loras` or `max_cpu_loras`.
        own: names of the command's settings.
        write: returns the spelling of a setting's name in the hint.
    """
    name = option.partition("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    if name == PLACE:
        return written(_PLACE, write)
    row = VLLM.get(name)
    if row is None or name in own:
        return None
    if row.kind == "same":
        return f"{_SERVE} it"
    others = [setting for setting in settings_named(row.description) if setting not in own]
    beyond = f"; {_SERVE} {' and '.join(map(write, others))}" if others else ""
    return f"vLLM's option, here {written(row.description, write)}{beyond}"
