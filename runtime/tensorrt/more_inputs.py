"""Inputs of the verifier's graph that a part of the runtime adds."""

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
    """Hooks of a model that is traced, which read inputs of the graph."""

    def enter(self, inputs: list[Tensor]) -> None:
        """Inputs of the pass to come, in the order of `MoreInputs.specs`."""
        ...

    def remove(self) -> None:
        """Take the hooks off the model."""
        ...


class MoreInputs(ABC):
    """Room of a part in the verifier's graph."""

    @abstractmethod
    def specs(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Its inputs, in their order."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Fields of `BaseEngineConfig` by which it is found again."""

    @abstractmethod
    def trace(self, model: nn.Module) -> TracedInputs:
        """Let the model read them."""

    @abstractmethod
    def bind(self, loaded: LoadedModel, limits: EngineConfig) -> Mapping[str, Tensor]:
        """Inputs at addresses that stay, by which the verifier serves what `limits` say."""

    @abstractmethod
    def of_pass(self, batch: Rows, rows: slice, shape: tuple[int, int]) -> dict[str, Tensor]:
        """All other inputs, of some rows of a batch.

        Args:
            shape: sequences of these rows, and rows of each.
        """
