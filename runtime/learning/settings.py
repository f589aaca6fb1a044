"""Settings of an online learner's process."""

from pathlib import Path

from pydantic import ConfigDict, Field

from wingbeat.runtime.learning.head_versions import LEARNER
from wingbeat.runtime.settings import Settings


class LearnerSettings(Settings):
    """Settings of a learner.

    Raises:
        pydantic.ValidationError: a field is out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path = Field(description="Folder of one verifier and one configured head.")
    verifier: Path = Field(description="Folder of the verifier.")
    verifier_name: str = Field(description="Display name of the verifier.")
    configured_head: Path = Field(description="Folder of the head named in the settings.")
    max_bytes: int = Field(gt=0, description="Most bytes of recorded rounds on disk.")
    expire_s: float = Field(gt=0, description="Age in seconds at which recorded rounds are removed.")
    core_share: float = Field(0.25, gt=0, le=1, description="Share of one core that the learner uses.")
    max_load: float = Field(4.0, gt=0, description="Load average at which the learner pauses.")
    margin: float = Field(0.02, ge=0, description="Relative gain by which a candidate must be better.")
    batch_size: int = Field(8, gt=0, description="Windows per training step.")
    sequence_length: int = Field(192, gt=16, description="Tokens per window.")
    learning_rate: float = Field(
        2e-3, gt=0, description="Largest learning rate; a candidate that is not better halves it."
    )
    warmup_steps: int = Field(20, ge=0, description="Steps over which the learning rate rises.")
    candidate_steps: int = Field(60, gt=0, description="Steps between two candidates.")
    least_tokens: int = Field(20_000, gt=0, description="Tokens of recorded rounds on disk before training starts.")
    least_held: int = Field(24, gt=0, description="Held-out requests on disk before a candidate is tested.")
    checkpoint_s: float = Field(60.0, gt=0, description="Seconds between two checkpoints.")
    refresh_s: float = Field(10.0, gt=0, description="Seconds between two looks at recorded rounds and ledger.")

    @property
    def rounds(self) -> Path:
        """Folder of the ring of recorded rounds."""
        return self.root / "rounds"

    @property
    def work(self) -> Path:
        """Folder of the learner's checkpoint and status file."""
        return self.root / LEARNER
