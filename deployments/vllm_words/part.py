"""Options of vLLM; imported by commands too, so that it imports what it adds where it adds it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from wingbeat.deployments.vllm_words.words import Words


def words_of_serve(args: "Sequence[str]", settings: "type[BaseModel]") -> "Words":
    """Settings in the place of vLLM's options."""
    from wingbeat.deployments.vllm_words.words import without_vllm

    return without_vllm(args, settings)


def hint(option: str, write: "Callable[[str], str]" = str) -> str | None:
    """Hint: the option to write in the place of one of vLLM."""
    from wingbeat.deployments.vllm_words import foreign_names

    return foreign_names.hint(option, write)
