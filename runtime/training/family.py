"""Interface that a family of heads implements so that its heads can be trained; all other training code is common to
all families.
"""

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
"""A `DraftHead`, or the head of a family in an optional part: a module with `taps_size`, `tap_layers` and
`draft_token_ids`.
"""

_CHAIN = 5


class Family(ABC):
    """A family of heads: its inputs, initial weights, loss and file format."""

    inside_verifier = False
    """Whether the head is written into a copy of the verifier's folder."""

    def tap_layers(self, config: TrainDrafterConfig, target: TargetDescription) -> tuple[int, ...]:
        """Layers of the verifier that the head taps; num_layers means the final norm's output.

        Raises:
            ValueError: the recording has no tap of a layer's input.
        """
        if config.tap_layers is not None:
            return config.tap_layers
        if config.recordings is None:
            return default_tap_layers(target.num_layers)
        # A recording may also contain the final norm's output, which this family does not use.
        recorded = RecordingReader(config.recordings).spec.tap_layers
        taps = tuple(layer for layer in recorded if layer < target.num_layers)
        if not taps:
            raise ValueError(
                f"the recording has taps {recorded}: family={config.family!r} needs inputs of layers, and it has none"
            )
        return taps

    @abstractmethod
    def new_head(
        self, config: TrainDrafterConfig, target: TargetDescription, weights: VerifierWeights, token_weights: Tensor
    ) -> TrainedHead:
        """The head from which training starts; all its weights are trainable except those taken from the verifier.

        Args:
            config: settings of the run.
            target: the verifier.
            weights: weights of the verifier.
            token_weights: [vocab_size], weight of each token in the choice of the draft vocabulary.

        Raises:
            ValueError: `config.initial_head` is of another family or shape, or the verifier's layer cannot be used in
                the head.
        """

    @abstractmethod
    def loss(self, head: TrainedHead, config: TrainDrafterConfig) -> nn.Module:
        """A module that contains the head and maps the tensors that `inputs` returns to the mean loss."""

    def inputs(self, config: TrainDrafterConfig, found: Inputs, step: int, part: Part) -> Inputs:
        """Converts the tensors `found`, which a source returned, to inputs of the module that `loss` returns. Must be a
        pure function of the arguments.
        """
        return found

    @abstractmethod
    def export(self, head: TrainedHead, config: TrainDrafterConfig, verifier: Path, path: Path) -> None:
        """Write a head in the format that users load."""

    @abstractmethod
    def matches(self, head: TrainedHead, token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
        """Whether the greedy draft of each step equals the text's token, if the head reads the text's tokens up to the
        step.

        Args:
            head: the head.
            token_ids: int64 [batch, length].
            taps: [batch, length, taps_size].
            num_steps: length of the chains.

        Returns:
            bool [batch, N, num_steps]: the chain at index i drafts the tokens after the token at i + 1.
        """

    def load(self, folder: Path, target: TargetDescription) -> TrainedHead:
        """Load a head of this family in float32, with the loader that the head's drafter uses. Weights that the head
        shares with the verifier are borrowed from the verifier.

        Raises:
            CheckpointError: the folder cannot be read, or the head belongs to another verifier.
        """
        raise NotImplementedError

    def free(self, head: TrainedHead) -> TrainedHead:
        """Make the head's weights trainable, except those borrowed from the verifier."""
        raise NotImplementedError

    def settings_of(self, head: TrainedHead) -> dict[str, Any]:
        """Fields of `TrainDrafterConfig` that an existing head determines."""
        return {}

    def chain(self, config: TrainDrafterConfig) -> int:
        """Length of the chains with which acceptance is measured."""
        return _CHAIN
