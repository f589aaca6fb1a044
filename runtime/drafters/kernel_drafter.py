"""A drafter over taps whose passes the CPU's kernels run where they know its head, and torch's operations elsewhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.drafters.base import DraftBatch, NextHead
from wingbeat.runtime.drafters.kernel_passes import KernelPasses
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.heads.contract import AnyKernelHead
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TokenTree
from wingbeat.runtime.verifier.layers.linears import lay_out_linears
from wingbeat.runtime.verifier.loading.cpu_threads import tried
from wingbeat.runtime.verifier.loading.round_trial import ROWS


class KernelDrafter(StagedDrafter):
    """Subclasses set `head`, which offers `kernel_head`, before the first `resize`."""

    head: Any
    """Weights, on the device to draft on."""
    load_head: Callable[[str], Any] | None = None
    """From a folder to a head as this one was loaded; None where nobody has said how."""
    _hidden: Tensor = torch.zeros(0)
    """State by slot, for kinds that keep some; float32 where kernels write it."""
    _passes: KernelPasses | None = None
    _num_threads: int | None = None

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        super().resize(spec, num_slots, num_blocks)
        self._passes = None
        kernels, fits = cpu_kernels(), self.growth.top_k <= len(self.head.draft_token_ids)
        fits &= self.speculation.draft_tree is None or self.growth.top_k == 1
        if kernels is None or self.device.type != "cpu" or self.pool.fixed_shapes or not fits:
            return
        kernel_head = self.head.kernel_head()
        if kernel_head is not None:
            self._hidden = self._hidden.float()
            self._passes = self._passes_of(self.head, kernel_head)

    def _passes_of(self, head: Any, kernel_head: AnyKernelHead) -> KernelPasses:
        return KernelPasses(
            cpu_kernels(),
            head,
            kernel_head,
            self.pool,
            self.speculation,
            least_levels=self.growth.depths[0],
            hidden=self._hidden,
            num_threads=self._num_threads,
        )

    def prepare_head(self, source: str) -> NextHead:
        """See `Drafter.prepare_head`."""
        if self.load_head is None:
            return super().prepare_head(source)
        head = self._read_alike(self.load_head(source))
        check_alike(head, self.head, source)
        lay_out_linears(head.eval().requires_grad_(False))
        return NextHead(head, None if self._passes is None else head.kernel_head())

    def take_head(self, head: NextHead) -> None:
        """See `Drafter.take_head`.

        Captured graphs hold the addresses of the weights, into which the others are then copied; elsewhere the head
        itself is replaced, which takes no time.
        """
        if self.graph_stats is not None and self.device.type != "cpu":
            others = tensors_of(head.head)
            for name, tensor in tensors_of(self.head).items():
                if tensor.data_ptr() != others[name].data_ptr():  # both borrow the same tensors from the verifier
                    tensor.copy_(others[name])
            return
        passes = self._passes
        if passes is not None:
            # There were no kernels when the head was prepared, where it has no head of theirs.
            passes = self._passes_of(head.head, head.kernel_head or head.head.kernel_head())
        self.head, self._passes = head.head, passes

    def _read_alike(self, head: Any) -> Any:
        """A head just loaded, read as this one is."""
        convention = self.head.convention
        return head if head.convention == convention else head.with_convention(convention)

    def try_threads(self, most: int) -> None:
        """See `Drafter.try_threads`."""
        if self._passes is not None and cpu_kernels() is not None:
            passes = self._passes
            self._num_threads = passes.num_threads = tried("drafter", ROWS, passes.nobodys, most)

    def commit(self, batch: DraftBatch) -> None:
        """See `Drafter.commit`."""
        if self._passes is None or cpu_kernels() is None:
            super().commit(batch)
            return
        if batch.chunk_inputs is not None:  # they know text alone
            self._commit_chunks(batch)
            batch = batch.without_chunks()
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


def tensors_of(head: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name; those of packed layers have their shapes and no numbers."""
    return {**dict(head.named_parameters()), **dict(head.named_buffers())}


def check_alike(head: nn.Module, served: nn.Module, source: str) -> None:
    """Refuse weights that could not draft in the place of others.

    Raises:
        ValueError: names the folder, the tensor, and what is wrong with it.
    """
    if type(head) is not type(served):
        raise ValueError(f"{source} holds a {type(head).__name__}, and a {type(served).__name__} is served")
    tensors, others = tensors_of(head), tensors_of(served)
    if tensors.keys() != others.keys():
        raise ValueError(f"{source} has other tensors: {', '.join(sorted(tensors.keys() ^ others.keys()))}")
    for name, tensor in tensors.items():
        if tensor.shape != others[name].shape or tensor.dtype != others[name].dtype:
            have, want = (f"{one.dtype} {list(one.shape)}" for one in (tensor, others[name]))
            raise ValueError(f"{name} of {source} is {have}: {want} is served")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise ValueError(f"{name} of {source} has numbers that are not finite")
    if not torch.equal(head.draft_token_ids, served.draft_token_ids):
        raise ValueError(f"{source} drafts other tokens than the head that is served: its draft vocabulary differs")
