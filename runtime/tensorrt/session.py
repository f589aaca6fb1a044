"""What runs an exported graph: tensors bound by name, one context a stage, enqueued on a stream.

Knows neither trees nor sequences.
"""

from collections.abc import Mapping
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


BASE_STAGES = (EngineStage.PREFILL, EngineStage.VERIFY, EngineStage.PLAIN)
DRAFT_STAGES = (EngineStage.PREFILL, EngineStage.PROPOSAL, EngineStage.ACCEPT)


class EngineError(RuntimeError):
    """An engine could not run; the message says which and why."""


class EngineLoadError(ValueError):
    """An engine or its graph cannot be loaded here; one line that says what to change."""


class TensorSpec(NamedTuple):
    """An input or an output of a graph."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """-1 stands for what each pass decides."""


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
    for name, spec in known.items():
        tensor = tensors[name]
        if tensor.dtype != spec.dtype:
            raise WrongInputError(f"{name} is {tensor.dtype}: the graph has {spec.dtype}")
        fits = tensor.dim() == len(spec.shape)
        if not fits or any(want not in (-1, have) for want, have in zip(spec.shape, tensor.shape, strict=True)):
            raise WrongInputError(f"{name} is {list(tensor.shape)}: the graph has {list(spec.shape)}")
        if not tensor.is_contiguous():
            raise WrongInputError(f"{name} has strides {tensor.stride()}: it must be contiguous")
