"""Interface for optional inputs of the verifier's graph. They are added by a runtime part, an optional component such
as LoRA.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.round.rows import Rows
from wingbeat.runtime.tensorrt.session import TensorSpec
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


class TracedInputs(Protocol):
    """Hooks on a traced model that read the optional inputs."""

    def enter(self, inputs: list[Tensor]) -> None:
        """Set the inputs of the next pass, in the order of `MoreInputs.specs`."""
        ...

    def remove(self) -> None:
        """Remove the hooks from the model."""
        ...


class MoreInputs(ABC):
    """Optional inputs of a runtime part in the verifier's graph."""

    @abstractmethod
    def specs(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Dtypes and shapes of the inputs, in order."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Fields of `BaseEngineConfig` from which the part restores this object."""

    @abstractmethod
    def trace(self, model: nn.Module) -> TracedInputs:
        """Install hooks with which the model reads the inputs."""

    @abstractmethod
    def bind(self, loaded: LoadedModel, limits: EngineConfig) -> Mapping[str, Tensor]:
        """Inputs at fixed addresses, sized for the served `limits`."""

    @abstractmethod
    def of_pass(self, batch: Rows, rows: slice, shape: tuple[int, int]) -> dict[str, Tensor]:
        """The inputs that change per pass, for some rows of a batch.

        Args:
            batch: the batch.
            rows: range of rows.
            shape: number of sequences in the range, and rows per sequence.
        """
