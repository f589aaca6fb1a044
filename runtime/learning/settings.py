"""Settings of an online learner, as its process is given them."""

from pathlib import Path

from pydantic import ConfigDict, Field

from wingbeat.runtime.learning.head_versions import LEARNER
from wingbeat.runtime.settings import Settings


class LearnerSettings(Settings):
    """Everything a learner goes by.

    Raises:
        pydantic.ValidationError: a field is out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path = Field(description="Folder of one verifier and one configured head.")
    verifier: Path = Field(description="Folder of the verifier.")
    verifier_name: str = Field(description="For people.")
    configured_head: Path = Field(description="Folder of the head that the settings name.")
    max_bytes: int = Field(gt=0, description="Of the rounds on disk.")
    expire_s: float = Field(gt=0, description="Age at which they go.")
    core_share: float = Field(0.25, gt=0, le=1, description="Share of one core.")
    max_load: float = Field(4.0, gt=0, description="Load average at which the learner pauses.")
    margin: float = Field(0.02, ge=0, description="By how much a candidate has to be better.")
    batch_size: int = Field(8, gt=0, description="Windows of a step.")
    sequence_length: int = Field(192, gt=16, description="Tokens of a window.")
    learning_rate: float = Field(2e-3, gt=0, description="At most; candidates that are not better halve it.")
    warmup_steps: int = Field(20, ge=0, description="Steps over which it rises.")
    candidate_steps: int = Field(60, gt=0, description="Steps between two candidates.")
    least_tokens: int = Field(20_000, gt=0, description="Of rounds on disk, before anything is trained.")
    least_held: int = Field(24, gt=0, description="Held-out requests, before a candidate is tested.")
    checkpoint_s: float = Field(60.0, gt=0, description="Between two checkpoints.")
    refresh_s: float = Field(10.0, gt=0, description="Between two looks at what came in.")

    @property
    def rounds(self) -> Path:
        """Folder of the ring."""
        return self.root / "rounds"

    @property
    def work(self) -> Path:
        """Folder of what is the learner's own: its checkpoint, and what it says of itself."""
        return self.root / LEARNER
