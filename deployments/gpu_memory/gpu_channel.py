"""The verifier's side of a channel through GPU memory."""

import logging
from typing import Any

from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.header import ChannelError, ChannelName
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.gpu_memory.taking_in import may_take_drafter_in
from wingbeat.deployments.replica.engine.pair_channel import GPU_MEMORY, OWN_DEVICE, PairChannel
from wingbeat.runtime.protocol.messages import ChannelSpec

logger = logging.getLogger(__name__)
TRIAL_WAIT_S = 0.05
"""Maximum seconds that one call of `try_drafter` waits for the data that proves that the channel works."""


class GpuPairChannel(PairChannel):
    """Channel through GPU memory. With the setting `channel: auto`, a channel in host memory replaces it if GPU memory
    does not work between the two processes.

    Args:
        runtime: CUDA runtime; with None, torch's runtime is used.

    Raises:
        ChannelError: the channel cannot be created; the message is one line that names what is missing.
    """

    def __init__(self, config: AppConfig, name: str, spec: ChannelSpec, runtime: Any = None) -> None:
        self._said = False
        self._name, self._spec = name, spec
        self._may_fall_back = config.channel == "auto"
        self._in_gpu_memory = False
        try:
            super().__init__(CudaIpcChannel.create(name, spec, OWN_DEVICE, runtime))
            self._in_gpu_memory = True
        except ChannelError as error:
            if not self._may_fall_back:
                raise
            super().__init__(self._in_host_memory(str(error), said=not may_take_drafter_in(config)))

    def try_drafter(self) -> bool:
        """See `PairChannel`. The call waits at most `TRIAL_WAIT_S`, because running requests wait meanwhile."""
        if self.problem is not None and not self._said:
            self._say()
        return not self._in_gpu_memory or self._channel.try_drafter(wait_s=TRIAL_WAIT_S)

    def fall_back(self, reason: str) -> ChannelName | None:
        """See `PairChannel`; logs one warning."""
        if not self._may_fall_back or not self._in_gpu_memory:
            return None
        self._channel.verifier_end.close()
        self._in_gpu_memory = False
        self._channel = self._in_host_memory(reason)
        return self._channel.name

    def _in_host_memory(self, reason: str, said: bool = True) -> ShmChannel:
        """Create a channel in host memory instead of GPU memory.

        With `said` False, the warning is logged later, by `try_drafter`.
        """
        self.problem = reason
        if said:
            self._say()
        return ShmChannel.create(f"{self._name}.host", self._spec)

    def _say(self) -> None:
        self._said = True
        logger.warning(
            "GPU memory does not carry rounds between the two processes: %s; host memory is used, at the cost of a "
            "copy in each round (set channel to shm to avoid this warning)",
            self.problem,
        )


def pair_channel(config: AppConfig, name: str, spec: ChannelSpec, address: str | None) -> GpuPairChannel | None:
    """Return the pair's channel if it is in GPU memory, else None."""
    in_gpu_memory = address is None and config.channel_kind() == GPU_MEMORY
    return GpuPairChannel(config, name, spec) if in_gpu_memory else None
