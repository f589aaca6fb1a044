"""Settings of a learner, which trains the draft head on what is served."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.pool_options import MOST_SECONDS
from wingbeat.deployments.options.words import object_of_json
from wingbeat.runtime.drafters.choice import USER
from wingbeat.runtime.refusals import Feature
from wingbeat.runtime.settings import Settings

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class LearnOptions(Settings):
    """The setting `learn`.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dir: Path | None = Field(
        None, description="Folder of what is stored; none takes `learning` in Wingbeat's cache folder."
    )
    max_bytes: int = Field(2 * 10**9, ge=1, description="Of tokens and hidden states on disk; then older ones go.")
    expire_s: float = Field(7 * 86400.0, gt=0, le=MOST_SECONDS, description="Age at which they go in any case.")
    share: float = Field(1.0, gt=0, le=1, description="Share of the requests that are learnt from.")
    trains: bool = Field(True, description="False stores and trains nothing, and serves what operators promote.")
    core_share: float = Field(0.25, gt=0, le=1, description="Share of one core that the learner may use.")
    max_load: float | None = Field(
        None, gt=0, description="Load average at which it pauses; none takes twice the cores there are."
    )
    margin: float = Field(0.02, ge=0, le=10, description="By how much a head has to be better to be promoted.")


def _from_command_line(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in _YES:
        return {}
    if isinstance(value, str) and value.lower() in _NO:
        return None
    if isinstance(value, bool):
        return {} if value else None
    return object_of_json(value, '{"core_share": 0.5}')


Learning = Annotated[LearnOptions | None, BeforeValidator(_from_command_line)]
"""The setting's type: true, a mapping, or either as text on the command line."""


class LearningOptions(ModelOptions):
    """The part of `AppConfig` that says whether the draft head learns."""

    learn: Learning = Field(
        None,
        description="Whether the draft head is trained on what is served, and replaced where it is measurably better: "
        'true, or fields such as {"core_share": 0.5}; others are dir, max_bytes, expire_s, share, trains, max_load, '
        "margin.",
    )

    def learns(self) -> bool:
        """Whether rounds are stored and a head is trained."""
        return self.learn is not None and self.learn.trains

    def check_learning(self, records: bool, draws_acceptance: bool) -> None:
        """Refuse what `learn` does not go with.

        Args:
            records: whether `recording_dir` is given.
            draws_acceptance: whether `forced_acceptance` is.

        Raises:
            ValueError: one line that says why.
        """
        if self.learn is None:
            return
        if self.choice().kind in (USER, "mtp"):
            raise ValueError(f"learn is given and drafter is {self.choice().label}: EAGLE and one-pass heads learn")
        if self.learns() and records:
            raise ValueError("learn and recording_dir are both given: learn stores rounds itself, leave one out")
        if draws_acceptance:
            raise ValueError("learn and forced_acceptance are both given: drawn text teaches no drafter")
        if self.learn.dir is not None and self.learn.dir.exists() and not self.learn.dir.is_dir():
            raise ValueError(f"learn.dir is {str(self.learn.dir)!r}: must be a directory, or not there yet")

    def asked(self) -> dict[Feature, tuple[bool, str]]:
        return super().asked() | {Feature.LEARN: (self.learn is not None, "learn is given")}
