"""What an operator can set about where drafters run."""

from typing import Literal

from pydantic import Field

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.node_resources import NodeResources
from wingbeat.deployments.options.pool_options import SharedDrafters
from wingbeat.runtime.refusals import Feature


class DrafterPlaceOptions(ModelOptions):
    """The part of `AppConfig` that says whose process a drafter is in, and on which nodes."""

    drafters: SharedDrafters = Field(
        None,
        description='Drafters that all verifiers share, such as {"num": 2}, placed by themselves; none gives each '
        "verifier its own. Further fields: max_num_seqs, kv_cache_memory_bytes, start_timeout_s.",
    )
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
        num_shared = self.drafters and self.drafters.num
        return super().asked() | {
            Feature.DRAFTER_IN_ENGINE: (self.drafts_in_engine(), "drafter_place is engine"),
            Feature.NO_DRAFTER: (not self.has_drafter(), "drafter is none"),
            Feature.SHARED_DRAFTERS: (self.drafters is not None, f"drafters.num is {num_shared}"),
        }

    def has_drafter(self) -> bool:
        """False where every request decodes plainly and no drafter process exists."""
        return self.choice().drafts

    def has_own_drafter(self) -> bool:
        """Whether each verifier has a drafter beside it, not one that is shared, within the engine, or none at all."""
        return self.has_drafter() and self.drafters is None and not self.drafts_in_engine()

    def has_channel(self) -> bool:
        """Whether rounds go to another process."""
        return self.has_drafter() and not self.drafts_in_engine()

    def shares_drafters(self) -> bool:
        """Whether drafters are placed by themselves, for all verifiers."""
        return self.has_drafter() and self.drafters is not None

    def drafts_in_engine(self) -> bool:
        """Whether a drafter is a part of its engine, by name."""
        return self.drafter_place == "engine"
