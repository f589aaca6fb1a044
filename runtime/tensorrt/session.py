"""What runs an exported graph: tensors bound by name, one context a stage, enqueued on a stream.

Knows neither trees nor sequences.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class EngineStage(StrEnum):
    """What a pass is for; every stage is one optimization profile of its graph."""

    PREFILL = "prefill"
    """Prompt tokens, of the verifier or of the drafter."""
    VERIFY = "verify"
    """Token trees."""
    PLAIN = "plain"
    """One token a sequence."""
    PROPOSAL = "proposal"
    """The tree drafted so far."""
    ACCEPT = "accept"
    """Accepted tokens with the verifier's hidden states."""
    ENCODE = "encode"
    """An image."""


BASE_STAGES = (EngineStage.PREFILL, EngineStage.VERIFY, EngineStage.PLAIN)
VISUAL_STAGES = (EngineStage.ENCODE,)
DRAFT_STAGES = (EngineStage.PREFILL, EngineStage.PROPOSAL, EngineStage.ACCEPT)


class EngineError(RuntimeError):
    """An engine could not run; the message says which and why."""


class EngineLoadError(ValueError):
    """An engine or its graph cannot be loaded here; one line that says what to change."""


class TensorSpec(NamedTuple):
    """An input or an output of a graph."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    """What each pass decides stands by a name, or as -1 where the name is not known."""

    def takes(self, shape: Sequence[int | str]) -> bool:
        """Whether this shape is of as many dimensions and equal in all that are fixed in both."""
        return len(shape) == len(self.shape) and all(
            _is_free(mine) or _is_free(other) or mine == other for mine, other in zip(self.shape, shape, strict=True)
        )


class EngineSession(Protocol):
    """A loaded graph. All calls come from one thread."""

    device: torch.device
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def bind(self, stage: EngineStage, tensors: Mapping[str, Tensor]) -> None:
        """Read a stage's inputs from these tensors and write its outputs into them, from its next run on.

        Args:
            tensors: contiguous, on the session's device, every input and output by name. Outputs named `present_` may
                share their input's memory.

        Raises:
            EngineError: a shape is outside the stage's profile.
        """

    def keep_bound(self, stage: EngineStage) -> None:
        """Leave what is bound to a stage as it is for good, for a captured graph; the stage is bound anew elsewhere."""

    def enqueue(self, stage: EngineStage) -> None:
        """Run what is bound, on torch's current stream; on the host it has run when this returns.

        Raises:
            EngineError: it could not be enqueued.
        """


class WrongInputError(ValueError):
    """A tensor is not what the graph takes; the message names it."""


def check_tensors(session: EngineSession, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with what a session's graph takes and gives.

    Raises:
        WrongInputError: one is missing, unknown, of another dtype or shape, or not contiguous; names tensor and value.
    """
    known = {**session.inputs, **session.outputs}
    odd = sorted(tensors.keys() ^ known.keys())
    if odd:
        raise WrongInputError(f"{odd[0]} is {'unknown to' if odd[0] in tensors else 'missing for'} the graph")
    check_dtypes(tensors, known)
    for name, spec in known.items():
        tensor = tensors[name]
        if not spec.takes(tensor.shape):
            raise WrongInputError(f"{name} is {list(tensor.shape)}: the graph has {list(spec.shape)}")
        if not tensor.is_contiguous():
            raise WrongInputError(f"{name} has strides {tensor.stride()}: it must be contiguous")


def check_dtypes(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> None:
    """Compare the dtypes of a graph's tensors.

    Raises:
        WrongInputError: one is of another; names tensor and value.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != specs[name].dtype:
            raise WrongInputError(f"{name} is {tensor.dtype}: the graph has {specs[name].dtype}")


def check_batch(num_seqs: int, parts: Mapping[str, Sequence | Tensor]) -> None:
    """Compare the first dimension of a pass's parts with its number of sequences.

    Raises:
        WrongInputError: one is of another batch; names it.
    """
    for name, part in parts.items():
        if len(part) != num_seqs:
            raise WrongInputError(f"{name} is of {len(part)} sequences: the batch has {num_seqs}")


def check_graph(session: EngineSession, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> None:
    """Compare a loaded graph with what its config says of it.

    Raises:
        EngineLoadError: a tensor is missing, unknown, or of another dtype or shape; names tensor and value.
    """
    for found, expected in ((session.inputs, inputs), (session.outputs, outputs)):
        odd = sorted(found.keys() ^ expected.keys())
        if odd:
            raise EngineLoadError(f"{odd[0]} is {'in' if odd[0] in found else 'not in'} the graph: its config differs")
        for name, spec in expected.items():
            have = found[name]
            if have.dtype != spec.dtype or not have.takes(spec.shape):
                raise EngineLoadError(
                    f"{name} is {have.dtype} {list(have.shape)} in the graph: its config asks for {spec.dtype} "
                    f"{list(spec.shape)}"
                )


def _is_free(dim: int | str) -> bool:
    return isinstance(dim, str) or dim == -1
