"""Settings of drafters that verifiers share, in place of one per verifier."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from wingbeat.deployments.options.words import object_of_json
from wingbeat.runtime.config import MOST_OF_ENGINE
from wingbeat.runtime.settings import Settings

VERIFIERS_HELD = 8
"""Verifiers that a drafter has slots for, where nothing is given: those of several drafters that are gone, too."""

MOST_PROCESSES = 10_000
"""Of one kind in an application."""
MOST_SECONDS = 1e7
"""What waits may be set to: more overflows a clock."""


class DrafterPoolOptions(Settings):
    """The setting `drafters`.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num: int = Field(ge=1, le=MOST_PROCESSES, description="Drafters, of whatever number of verifiers.")
    max_num_seqs: int | None = Field(
        None, ge=1, le=MOST_OF_ENGINE["max_num_seqs"], description="Sequences that one drafter drafts for."
    )
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="Of the KV that one drafter keeps.")
    start_timeout_s: float = Field(
        30.0,
        ge=0,
        le=MOST_SECONDS,
        description="What a starting verifier waits for a drafter before it serves without one.",
    )

    def check(self, max_num_seqs: int) -> None:
        """Raises ValueError where a drafter has no room for one verifier, of so many sequences."""
        if self.max_num_seqs is not None and self.max_num_seqs < max_num_seqs:
            raise ValueError(
                f"drafters.max_num_seqs is {self.max_num_seqs}: at least max_num_seqs, {max_num_seqs}, or no verifier "
                "fits"
            )

    def slots(self, max_num_seqs: int) -> int:
        """Sequences of one drafter.

        Args:
            max_num_seqs: of one verifier.
        """
        return self.max_num_seqs or VERIFIERS_HELD * max_num_seqs


def _from_command_line(value: Any) -> Any:
    return object_of_json(value, '{"num": 2}')


SharedDrafters = Annotated[DrafterPoolOptions | None, BeforeValidator(_from_command_line)]
"""The setting's type: as a mapping, or as JSON on the command line."""
