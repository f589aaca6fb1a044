"""What an operator can set about where drafters run."""

from typing import Literal

from pydantic import Field

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.node_resources import NodeResources
from wingbeat.deployments.parts import first
from wingbeat.runtime.refusals import Feature


class DrafterPlaceOptions(ModelOptions):
    """The part of `AppConfig` that says whose process a drafter is in, and on which nodes."""

    drafter_place: Literal["actor", "engine"] = Field(
        "actor",
        description="Where a verifier's drafter runs: in an actor of its own, or in the engine's process, without a "
        "channel, each ending with the other. Where it is not given, a GPU without CUDA IPC makes it engine.",
    )
    drafter_resources: NodeResources = Field(
        None,
        description="Ray resources of the nodes that drafters may run on, beside CPUs and GPUs, such as cheap_gpu.",
    )

    def asked(self) -> dict[str, tuple[bool, str]]:
        return super().asked() | {
            Feature.DRAFTER_IN_ENGINE: (self.drafts_in_engine(), "drafter_place is engine"),
            Feature.NO_DRAFTER: (not self.has_drafter(), "drafter is none"),
        }

    def has_drafter(self) -> bool:
        """False where every request decodes plainly and no drafter process exists."""
        return self.choice().drafts

    def has_own_drafter(self) -> bool:
        """Whether each verifier has a drafter beside it, not one that is shared, within the engine, or none at all."""
        return self.has_channel() and not self.num_shared_drafters()

    def has_channel(self) -> bool:
        """Whether rounds go to another process."""
        return self.has_drafter() and not self.drafts_in_engine()

    def num_shared_drafters(self) -> int:
        """Drafters that are placed by themselves, for all verifiers; 0 where each has its own."""
        return first("num_shared_drafters", self) or 0

    def drafts_in_engine(self) -> bool:
        """Whether a drafter is a part of its engine, by name."""
        return self.drafter_place == "engine"
