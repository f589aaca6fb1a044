"""Code of a shared drafter's process: its calls, and the limits on the slots and memory that verifiers may use."""

import logging
import os
import pickle
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.drafters import drafter_calls
from wingbeat.deployments.shared_drafters.shared_drafter import Placed
from wingbeat.runtime.kv.pool import memory_budget
from wingbeat.runtime.shared_drafters.draft_room import DraftRoom, NoRoomError

logger = logging.getLogger(__name__)


class SharedDrafterCalls(drafter_calls.DrafterCalls):
    """Methods of a shared drafter's process; the drafter's actor calls them by name."""

    def attach_shared(self, name: ChannelName, incarnation: int, terms: bytes | None) -> Placed:
        """Serve one more channel if enough slots and memory are free.

        Args:
            terms: pickled `DrafterTerms` as for `needs`; a shared drafter ignores their `loan`. None if the verifier
                has sent no terms.

        Raises:
            ChannelError, ValueError: as `DrafterThread.attach`.
        """
        try:
            self._thread.attach(name, incarnation, None if terms is None else pickle.loads(terms).convention)
        except NoRoomError as error:
            return Placed(os.getpid(), str(error))
        return Placed(os.getpid())

    def detach(self, name: ChannelName) -> None:
        """Stop serving a channel; does nothing if the channel is not served."""
        self._thread.detach(name)

    def release_newest(self) -> None:
        """Detach the verifier that attached last; this verifier then requests slots from another drafter."""
        for name in self._thread.channels()[-1:]:
            logger.info("detached %s: another drafter has fewer verifiers", name)
            self._thread.detach(name)


def serve(connection: Connection) -> None:
    """See `drafter_calls.serve`."""
    drafter_calls.serve(connection, SharedDrafterCalls)


def room_of(config: AppConfig, device: torch.device) -> DraftRoom:
    """Return the slots and memory that verifiers may use. Must be called after the drafter's weights have been loaded
    to the device.
    """
    options, limits = config.drafters, config.engine_config()
    share = min(config.num_gpus_per_drafter, 1.0) or 1.0
    budget = memory_budget(replace(limits, kv_cache_memory_bytes=None, gpu_share=share), device)
    if device.type == "cpu":
        budget //= options.num  # because all drafters of the pool may be on one node
    return DraftRoom(options.slots(limits.max_num_seqs), options.kv_cache_memory_bytes or max(budget, 0))
