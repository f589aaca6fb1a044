"""Settings of a learner, which trains the draft head on served traffic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from wingbeat.deployments.limits import MOST_SECONDS
from wingbeat.deployments.options.panel_titles import LEARNING
from wingbeat.deployments.options.words import object_of_json
from wingbeat.runtime.drafters.choice import CHECKPOINT, TEXT_DRAFTERS
from wingbeat.runtime.refusals import Feature, Refusal
from wingbeat.runtime.settings import Settings

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

LEARN = "`learn`"
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class LearnOptions(Settings):
    """Fields of the setting `learn`.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside the allowed range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dir: Path | None = Field(
        None, description="Folder for stored rounds and heads. By default `learning` in Wingbeat's cache folder."
    )
    max_bytes: int = Field(
        2 * 10**9,
        ge=1,
        description="Maximum bytes of stored tokens and hidden states. When it is reached, a random part of them "
        "is deleted, but none of the newest quarter.",
    )
    expire_s: float = Field(
        7 * 86400.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds after which stored tokens and hidden states are deleted.",
    )
    share: float = Field(1.0, gt=0, le=1, description="Fraction of the requests that is learnt from.")
    trains: bool = Field(
        True,
        description="If false, nothing is stored or trained, and the server uses the heads that operators promote.",
    )
    core_share: float = Field(0.25, gt=0, le=1, description="Fraction of one CPU core that the learner may use.")
    max_load: float | None = Field(
        None, gt=0, description="Load average at which the learner pauses. By default twice the number of cores."
    )
    margin: float = Field(
        0.02, ge=0, le=10, description="Relative improvement of the acceptance that a head needs to be promoted."
    )


def _from_command_line(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in _YES:
        return {}
    if isinstance(value, str) and value.lower() in _NO:
        return None
    if isinstance(value, bool):
        return {} if value else None
    return object_of_json(value, '{"core_share": 0.5}')


Learning = Annotated[LearnOptions | None, BeforeValidator(_from_command_line)]
"""Type of the setting `learn`: true or a mapping; on the command line, the text of either."""
_DESCRIPTION = (
    "Train the draft head on served requests, and replace it when a new version is measurably better: true, or JSON "
    'such as {"core_share": 0.5}. Fields: dir, max_bytes, expire_s (seconds), share (of the requests), trains, '
    "core_share (of one core), max_load (load average), margin (by how much a new version must be better)."
)
SETTINGS = {"learn": (Learning, Field(None, description=_DESCRIPTION, json_schema_extra={"panel": LEARNING}))}


def learns(config: "AppConfig") -> bool:
    """Whether rounds are stored and the draft head is trained."""
    return config.learn is not None and config.learn.trains


def check_settings(config: "AppConfig") -> None:
    """Refuse settings that cannot be combined with `learn`.

    Raises:
        ValueError: the message is one line that gives the reason.
    """
    if config.learn is None:
        return
    choice = config.choice()
    if choice.drafts and choice.kind not in (CHECKPOINT, *TEXT_DRAFTERS):
        raise ValueError(f"learn is given and drafter is {choice.label}: EAGLE and one-pass heads learn")
    if config.learn.trains and config.recording_dir is not None:
        raise ValueError("learn and recording_dir are both given: learn stores rounds itself, leave one out")
    if config.forced_acceptance is not None:
        raise ValueError("learn and forced_acceptance are both given: drawn text teaches no drafter")
    if config.drafter_factory is not None:
        raise ValueError(f"learn is given and drafter_factory is {config.drafter_factory}: its worker has no head")
    folder = config.learn.dir
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ValueError(f"learn.dir is {str(folder)!r}: must be a directory, or not exist yet")


def asked(config: "AppConfig") -> dict[str, tuple[bool, str]]:
    """Return a pair for the feature `LEARN`: whether the settings turn learning on, and a phrase that names the setting
    in error messages.
    """
    return {LEARN: (config.learn is not None, "learn is given")}


_NOTHING_TO_LEARN = {
    Feature.NO_DRAFTER: "there is no head to train",
    Feature.TEXT_DRAFTER: "earlier text has no head to train",
    Feature.ENGINE_DIR: "an engine's weights are fixed",
    Feature.OWN_ENGINE: "that engine does not expose its rounds",
}
REFUSED = tuple(Refusal(LEARN, other, why, "leave learn out") for other, why in _NOTHING_TO_LEARN.items())
