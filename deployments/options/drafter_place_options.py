"""Settings for the processes and nodes in which drafters run."""

from typing import Literal

from pydantic import Field

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.node_resources import NodeResources
from wingbeat.deployments.parts import first_result
from wingbeat.runtime.refusals import Feature


class DrafterPlaceOptions(ModelOptions):
    """Settings of `AppConfig` for the process and the nodes that drafters run on."""

    drafter_place: Literal["actor", "engine"] = Field(
        "actor",
        description="Where each verifier's drafter runs: 'actor' is a process of its own that exchanges rounds with "
        "the engine over a channel; 'engine' is the engine's process, without a channel, so that a crash "
        "of either ends both. If the setting is absent and two processes cannot share the GPU's memory "
        "(no CUDA IPC), 'engine' is chosen.",
    )
    drafter_resources: NodeResources = Field(
        None,
        description="Custom Ray resources that each drafter reserves, in addition to CPUs and GPUs, as JSON such "
        "as {\"cheap_gpu\": 1}; drafters run only on nodes that have these resources. With channel 'auto', drafters "
        "may then run on other nodes than their verifiers.",
    )

    def asked(self) -> dict[str, tuple[bool, str]]:
        return super().asked() | {
            Feature.DRAFTER_IN_ENGINE: (self.drafts_in_engine(), "drafter_place is engine"),
            Feature.NO_DRAFTER: (not self.has_drafter(), "drafter is none"),
        }

    def has_drafter(self) -> bool:
        """Whether there is a drafter; without a drafter, all requests are decoded plainly."""
        return self.choice().drafts

    def has_own_drafter(self) -> bool:
        """Whether each verifier has its own drafter process, and neither a shared drafter nor a drafter in the engine's
        process.
        """
        return self.has_channel() and not self.num_shared_drafters()

    def has_channel(self) -> bool:
        """Whether the drafter runs in another process, so that rounds are sent through a channel."""
        return self.has_drafter() and not self.drafts_in_engine()

    def num_shared_drafters(self) -> int:
        """Returns the number of drafters that all verifiers share; 0 if each verifier has its own drafter."""
        return first_result("num_shared_drafters", self) or 0

    def drafts_in_engine(self) -> bool:
        """Whether the setting `drafter_place` puts the drafter into the engine's process."""
        return self.drafter_place == "engine"
