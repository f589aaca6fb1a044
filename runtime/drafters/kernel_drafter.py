"""A drafter over taps whose passes the CPU's kernels run where they know its head, and torch's operations elsewhere."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.kernel_passes import AnyKernelHead, KernelPasses
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TokenTree
from wingbeat.runtime.verifier.loading.cpu_threads import tried


class KernelDrafter(StagedDrafter):
    """Whoever builds upon it sets `head` before the first `resize`."""

    head: Any
    """Weights, on the device to draft on."""
    _hidden: Tensor = torch.zeros(0)
    """What is kept by slot, where something is: in float32 where kernels write it."""
    _passes: KernelPasses | None = None
    _num_threads: int | None = None

    @abstractmethod
    def _kernel_head(self) -> AnyKernelHead | None:
        """The head as kernels read it; None where they do not know it."""

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        super().resize(spec, num_slots, num_blocks)
        self._passes = None
        kernels, fits = cpu_kernels(), self.growth.top_k <= len(self.head.draft_token_ids)
        fits &= self.speculation.draft_tree is None or self.growth.top_k == 1
        if kernels is None or self.device.type != "cpu" or self.pool.fixed_shapes or not fits:
            return
        kernel_head = self._kernel_head()
        if kernel_head is not None:
            self._hidden = self._hidden.float()
            parts = (self.head, kernel_head, self.pool, self.speculation, self.growth.depths[0], self._hidden)
            self._passes = KernelPasses(kernels, *parts, self._num_threads)

    def try_threads(self, most: int) -> None:
        """See `Drafter.try_threads`."""
        if self._passes is not None and cpu_kernels() is not None:
            passes = self._passes
            self._num_threads = passes.num_threads = tried("drafter", passes.nobodys, most)

    def commit(self, batch: DraftBatch) -> None:
        """See `Drafter.commit`."""
        if self._passes is None or cpu_kernels() is None:
            super().commit(batch)
        else:
            self._passes.commit(batch)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter.propose`."""
        if self._passes is None or cpu_kernels() is None:
            return super().propose(batch)
        return self._passes.propose(batch, self.growth.depth(batch))

    def answer(self, end: DrafterEnd, outcome: Outcome) -> bool:
        """See `Drafter.answer`."""
        return self._passes is not None and cpu_kernels() is not None and self._passes.answer(end, outcome)

    def _check_taps(self, spec: ChannelSpec) -> None:
        if spec.taps_size != self.head.taps_size:
            raise ValueError(f"the verifier sends taps of size {spec.taps_size}: this head needs {self.head.taps_size}")
