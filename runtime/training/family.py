"""What a kind of head must say to be trained; everything else is the same for all kinds."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wingbeat.runtime.heads.conventions import default_tap_layers
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.loop import Inputs
from wingbeat.runtime.training.parallel import Part
from wingbeat.runtime.training.verifier_weights import VerifierWeights

TrainedHead = Any
"""A `DraftHead`, or the head of a family of a part: a module with `taps_size`, `tap_layers` and `draft_token_ids`."""

_CHAIN = 5


class Family(ABC):
    """A kind of head: what it reads, how it starts, what it learns, and how it is written."""

    inside_verifier = False
    """It is written into a copy of the verifier's folder."""

    def tap_layers(self, config: TrainDrafterConfig, target: TargetDescription) -> tuple[int, ...]:
        """Layers of the verifier that the head reads; the number of layers stands for the final norm's output.

        Raises:
            ValueError: the recording has taps of no layer's input.
        """
        if config.tap_layers is not None:
            return config.tap_layers
        if config.recordings is None:
            return default_tap_layers(target.num_layers)
        # The final norm's output is there for other families.
        recorded = RecordingReader(config.recordings).spec.tap_layers
        taps = tuple(layer for layer in recorded if layer < target.num_layers)
        if not taps:
            raise ValueError(f"the recording has taps {recorded}: family={config.family!r} reads the input of layers")
        return taps

    @abstractmethod
    def new_head(
        self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights, token_weights: Tensor
    ) -> TrainedHead:
        """The head training starts from, its weights that are not the verifier's free to change.

        Args:
            token_weights: [vocab_size], how much each token counts for a draft vocabulary.

        Raises:
            ValueError: `config.initial_head` is of another family or shape, or the verifier's layer does not fit.
        """

    @abstractmethod
    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """Holds the head; maps the tensors of `inputs` to the mean loss."""

    def inputs(self, config: TrainDrafterConfig, found: Inputs, step: int, part: Part) -> Inputs:
        """What `loss` reads, from what a source gives; depends on the arguments alone."""
        return found

    @abstractmethod
    def export(self, head: TrainedHead, config: TrainDrafterConfig, verifier: Path, path: Path) -> None:
        """Write a head as users load it."""

    @abstractmethod
    def matches(self, head: TrainedHead, token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
        """Whether the greedy draft of each step is the text's token, given that all before it are.

        Args:
            token_ids: int64 [batch, length].
            taps: [batch, length, taps_size].

        Returns:
            bool [batch, N, num_steps]: those at index i draft behind the token at i + 1.
        """

    def load(self, folder: Path, target: TargetDescription) -> TrainedHead:
        """A head of this family in float32, as its drafter loads it; what is the verifier's is taken from there.

        Raises:
            CheckpointError: it cannot be read, or is of another verifier.
        """
        raise NotImplementedError

    def free(self, head: TrainedHead) -> TrainedHead:
        """The head with its weights free to change, but for those that stay the verifier's."""
        raise NotImplementedError

    def settings_of(self, head: TrainedHead) -> dict[str, Any]:
        """Fields of `TrainDrafterConfig` that a head that is there has settled."""
        return {}

    def chain(self, config: TrainDrafterConfig) -> int:
        """Length of the chains that acceptance is measured with."""
        return _CHAIN
