"""`HeadDrafter`: a drafter with a head over taps, which can be swapped for another head of the same shape."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wingbeat.runtime.drafters.base import DraftBatch, NextHead
from wingbeat.runtime.drafters.head_passes import HeadPasses
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, TokenTree
from wingbeat.runtime.verifier.layers.linears import Packable, lay_out_linears


class HeadDrafter(StagedDrafter):
    """Base of drafters with a head. Subclasses set `head` before the first `resize`."""

    head: Any
    """The head's weights, on the drafter's device."""
    load_head: Callable[[str], Any] | None = None
    """Loads another head from a folder with this head's options; None if swapping is not supported."""
    hidden: Tensor = torch.zeros(0)
    """State of each slot, for kinds of drafters that keep state; the float type is that of the code that writes the
    state."""
    passes: HeadPasses | None = None
    """Compiled passes that replace torch operations; None if torch runs them."""

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        super().resize(spec, num_slots, num_blocks)
        if self.passes is not None:
            self.passes.resized()
        elif not self.fixed_shapes:
            self.passes = first_result("draft_passes", self)

    def prepare_head(self, source: str) -> NextHead:
        """See `Drafter.prepare_head`."""
        if self.load_head is None:
            return super().prepare_head(source)
        head = self._read_alike(self.load_head(source))
        check_alike(head, self.head, source)
        lay_out_linears(head.eval().requires_grad_(False))
        return NextHead(head, None if self.passes is None else self.passes.prepare(head))

    def take_head(self, head: NextHead) -> None:
        """Replace the head; see `Drafter.take_head`.

        If graphs are captured, the new weights are copied into the old tensors, because the graphs hold the old
        tensors' addresses. Otherwise the head object is replaced, without a copy.
        """
        if self.graph_stats is not None and self.device.type != "cpu":
            others = tensors_of(head.head)
            for name, tensor in tensors_of(self.head).items():
                # the pointers are equal if the old and the new head use the verifier's tensor
                if tensor.data_ptr() != others[name].data_ptr():
                    tensor.copy_(others[name])
            return
        if self.passes is not None:  # `prepared` is None if the head was prepared before the first verifier attached
            # `self.passes` exists only once a verifier is attached. If `prepare_head` ran earlier, `head.prepared` is
            # None although the passes need prepared weights, so the head is converted here.
            self.passes.use_weights(self.passes.prepare(head.head) if head.prepared is None else head.prepared)
        self.head = head.head

    def _read_alike(self, head: Any) -> Any:
        """Returns a newly loaded head in the convention of the current head."""
        convention = self.head.convention
        return head if head.convention == convention else head.with_convention(convention)

    def try_threads(self, most: int) -> None:
        """See `Drafter.try_threads`."""
        if self.passes is not None:
            self.passes.try_threads(most)

    def commit(self, batch: DraftBatch) -> None:
        """See `Drafter.commit`."""
        if self.passes is None:
            super().commit(batch)
            return
        if batch.chunk_inputs is not None:  # passes accept text chunks only
            self._commit_chunks(batch)
            batch = batch.without_chunks()
        self.passes.commit(batch)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter.propose`."""
        if self.passes is None:
            return super().propose(batch)
        return self.passes.propose(batch, self.growth.depth(batch))

    def answer(self, end: DrafterEnd, outcome: Outcome) -> bool:
        """See `Drafter.answer`."""
        return self.passes is not None and self.passes.answer(end, outcome)

    def _check_taps(self, spec: ChannelSpec) -> None:
        if spec.taps_size != self.head.taps_size:
            raise ValueError(f"the verifier sends taps of size {spec.taps_size}: this head needs {self.head.taps_size}")


def tensors_of(head: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by name.

    The weight of a packed layer is replaced by the tensors that its kernel reads.
    """
    found = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    for name, module in head.named_modules():
        packed = module.packed_tensors() if isinstance(module, Packable) else []
        if packed:
            del found[f"{name}.weight"]
            found |= {f"{name}.packed.{index}": part for index, part in enumerate(packed)}
    return found


def check_alike(head: nn.Module, served: nn.Module, source: str) -> None:
    """Check that a head can replace the served head.

    Raises:
        ValueError: names the folder, the tensor and the difference.
    """
    if type(head) is not type(served):
        raise ValueError(f"{source} holds a {type(head).__name__}, but a {type(served).__name__} is served")
    tensors, others = tensors_of(head), tensors_of(served)
    if tensors.keys() != others.keys():
        raise ValueError(
            f"{source} has other tensors than the served head: {', '.join(sorted(tensors.keys() ^ others.keys()))}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != others[name].shape or tensor.dtype != others[name].dtype:
            have, want = (f"{one.dtype} {list(one.shape)}" for one in (tensor, others[name]))
            raise ValueError(f"{name} of {source} is {have}, but {want} in the served head")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise ValueError(f"{name} of {source} has values that are not finite")
    if not torch.equal(head.draft_token_ids, served.draft_token_ids):
        raise ValueError(f"{source} has another draft vocabulary than the served head")
