"""Settings of shared drafters, each of which serves several verifiers."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from wingbeat.deployments.limits import MOST_PROCESSES, MOST_SECONDS
from wingbeat.deployments.options.panel_titles import CLUSTER
from wingbeat.deployments.options.words import object_of_json
from wingbeat.runtime.config import MOST_OF_ENGINE
from wingbeat.runtime.refusals import Feature, Refusal
from wingbeat.runtime.settings import Settings

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

VERIFIERS_HELD = 8
"""Default number of verifiers that a drafter has slots for. The number is high enough that a drafter can take over the
verifiers of failed drafters.
"""

SHARED_DRAFTERS, _REMEDY = "`drafters`", "leave drafters out"


class DrafterPoolOptions(Settings):
    """Fields of the setting `drafters`.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside the allowed range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num: int = Field(ge=1, le=MOST_PROCESSES, description="Number of drafters, whatever the number of verifiers.")
    max_num_seqs: int | None = Field(
        None, ge=1, le=MOST_OF_ENGINE["max_num_seqs"], description="Sequences that one drafter drafts for."
    )
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="Bytes of the KV cache that one drafter keeps.")
    start_timeout_s: float = Field(
        30.0,
        ge=0,
        le=MOST_SECONDS,
        description="Seconds that a starting verifier waits for a drafter before it serves without one.",
    )

    def slots(self, max_num_seqs: int) -> int:
        """Return the number of sequences for which one drafter has slots.

        Args:
            max_num_seqs: maximum sequences of one verifier.
        """
        return self.max_num_seqs or VERIFIERS_HELD * max_num_seqs


def _from_command_line(value: Any) -> Any:
    return object_of_json(value, '{"num": 2}')


SharedDrafters = Annotated[DrafterPoolOptions | None, BeforeValidator(_from_command_line)]
"""Type of the setting `drafters`: a mapping, or JSON on the command line."""
_DESCRIPTION = (
    'Drafters that all verifiers share, placed independently of them, as JSON such as {"num": 2}. Further fields: '
    "max_num_seqs (sequences that one drafter drafts for), kv_cache_memory_bytes (KV cache of one drafter), "
    "start_timeout_s (seconds that a verifier waits for a drafter at its start, by default 30). By default each "
    "verifier has its own drafter."
)
_FIELD = Field(None, description=_DESCRIPTION, json_schema_extra={"panel": CLUSTER})
SETTINGS = {"drafters": (SharedDrafters, _FIELD)}
REFUSED = (
    Refusal(SHARED_DRAFTERS, Feature.NO_DRAFTER, "it leaves nothing to share", _REMEDY),
    Refusal(SHARED_DRAFTERS, Feature.ENGINE_DIR, "each of its verifiers has a drafter of its own", _REMEDY),
    Refusal(Feature.DRAFTER_IN_ENGINE, SHARED_DRAFTERS, "shared drafters have processes of their own"),
)


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError if a drafter has too few slots for one verifier."""
    most, needed = config.drafters and config.drafters.max_num_seqs, config.most_num_seqs()
    if most is not None and most < needed:
        raise ValueError(f"drafters.max_num_seqs is {most}: use at least max_num_seqs, {needed}, or no verifier fits")


def check_before_start(config: "AppConfig") -> None:
    """Raise ValueError if drafters on CPUs reserve more memory than this machine has."""
    num_bytes = config.drafters and config.drafters.kv_cache_memory_bytes
    if num_bytes and config.resolved_device() == "cpu":
        from wingbeat.runtime.free_memory import total_memory
        from wingbeat.runtime.kv.capacity import check_budget

        check_budget("drafters.kv_cache_memory_bytes", num_bytes, total_memory(), "cpu")


def asked(config: "AppConfig") -> dict[str, tuple[bool, str]]:
    """Return a pair for the feature `SHARED_DRAFTERS`: whether the settings turn shared drafters on, and a phrase that
    names the setting in error messages.
    """
    shared = config.drafters
    return {SHARED_DRAFTERS: (shared is not None, f"drafters.num is {shared and shared.num}")}
