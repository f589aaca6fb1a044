"""Interface that runs an exported graph: tensors bound by name, one context per stage, enqueued on a stream.

The interface has no concept of trees or sequences.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class EngineStage(StrEnum):
    """Purpose of a pass; each stage is one optimization profile of its graph."""

    PREFILL = "prefill"
    """Prompt tokens, in the verifier's or the drafter's graph."""
    VERIFY = "verify"
    """Token trees in the verifier's graph."""
    PLAIN = "plain"
    """A single token per sequence in the verifier's graph."""
    PROPOSAL = "proposal"
    """The tree drafted so far, in the drafter's graph."""
    ACCEPT = "accept"
    """Accepted tokens with the verifier's hidden states, in the drafter's graph."""
    ENCODE = "encode"
    """An image, or a window of sound, in the encoder's graph."""


BASE_STAGES = (EngineStage.PREFILL, EngineStage.VERIFY, EngineStage.PLAIN)
ENCODER_STAGES = (EngineStage.ENCODE,)
DRAFT_STAGES = (EngineStage.PREFILL, EngineStage.PROPOSAL, EngineStage.ACCEPT)


class EngineError(RuntimeError):
    """An engine failed to run; the message names the engine and the reason."""


class EngineLoadError(ValueError):
    """An engine or its graph cannot be loaded here; the message is one line that says what to change."""


class TensorSpec(NamedTuple):
    """Dtype and shape of a graph's input or output."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    """Sizes of the dimensions; a free dimension is a name, or -1 if its name is unknown."""

    def takes(self, shape: Sequence[int | str]) -> bool:
        """Whether `shape` has the same number of dimensions as this spec, and the same size in each dimension that is
        fixed in both.
        """
        return len(shape) == len(self.shape) and all(
            _is_free(mine) or _is_free(other) or mine == other for mine, other in zip(self.shape, shape, strict=True)
        )


class EngineSession(Protocol):
    """A loaded graph. All calls must come from one thread."""

    device: torch.device
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def bind(self, stage: EngineStage, tensors: Mapping[str, Tensor]) -> None:
        """Make the next runs of a stage read their inputs from these tensors and write their outputs into them.

        Args:
            stage: the stage.
            tensors: every input and output by name, contiguous, on the session's device. Outputs named `present_` may
                share their input's memory.

        Raises:
            EngineError: a shape is outside the stage's profile.
        """

    def keep_bound(self, stage: EngineStage) -> None:
        """Keep a stage's current binding for a captured graph; later bindings of the stage use another context."""

    def enqueue(self, stage: EngineStage) -> None:
        """Run the stage with its bound tensors on torch's current stream; on the host the run is complete on return.

        Raises:
            EngineError: the run could not be enqueued.
        """


class WrongInputError(ValueError):
    """A tensor does not match the graph's input; the message names the tensor."""


def check_tensors(session: EngineSession, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with a session's inputs and outputs.

    Raises:
        WrongInputError: a tensor is missing, unknown, not contiguous, or has another dtype or shape; the message names
            tensor and value.
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
    """Compare dtypes of tensors with a graph's specs.

    Raises:
        WrongInputError: a dtype differs; the message names tensor and value.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != specs[name].dtype:
            raise WrongInputError(f"{name} is {tensor.dtype}: the graph has {specs[name].dtype}")


def check_batch(num_seqs: int, parts: Mapping[str, Sequence | Tensor]) -> None:
    """Compare the first dimension of a pass's inputs with its number of sequences.

    Raises:
        WrongInputError: an input has another batch size; the message names the input.
    """
    for name, part in parts.items():
        if len(part) != num_seqs:
            raise WrongInputError(f"{name} is of {len(part)} sequences: the batch has {num_seqs}")


def check_graph(session: EngineSession, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> None:
    """Compare a loaded graph with its config.

    Raises:
        EngineLoadError: a tensor is missing, unknown, or has another dtype or shape; the message names tensor and
            value.
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
