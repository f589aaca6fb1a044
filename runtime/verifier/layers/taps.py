"""Hidden states of a causal LM: hooks on chosen layers, for serving, recording and training alike."""

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from wingbeat.runtime.verifier.layers.loaded_model import UnsupportedModelError


class LayerTaps:
    """Keeps the residual stream that enters chosen layers (EAGLE-3 section 3.1).

    Args:
        layers: of the decoder, as `decoder_layers` finds them.
        tap_layers: layers whose *input* is tapped, ascending; the number of layers stands for what enters the output
            head, the final norm's result. Empty taps nothing.

    Raises:
        ValueError: there is no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, tap_layers: tuple[int, ...]) -> None:
        bad = [layer for layer in tap_layers if not 0 <= layer <= len(layers)]
        if bad:
            raise ValueError(
                f"tap_layers {bad} do not exist: {type(model).__name__} has layers 0..{len(layers) - 1}, and "
                f"{len(layers)} is what enters its output matrix"
            )
        self._taps: list[Tensor] = []
        self._hooks = [
            layers[layer].register_forward_pre_hook(self._tap, with_kwargs=True)
            for layer in tap_layers
            if layer < len(layers)
        ]
        if len(layers) in tap_layers:
            decoder = next(module for module in model.modules() if layers in list(module.children()))
            self._hooks.append(decoder.register_forward_hook(self._tap_output))

    def clear(self) -> None:
        """Forget what the passes so far left; before each pass."""
        self._taps = []

    def take(self) -> list[Tensor]:
        """Of the pass since `clear`: [batch, length, hidden_size] each, low layers first."""
        taps, self._taps = self._taps, []
        return taps

    def remove(self) -> None:
        """Detach the hooks from the model, which outlives this object where several share it."""
        for hook in self._hooks:
            hook.remove()

    def _tap(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._taps.append(args[0] if args else kwargs["hidden_states"])

    def _tap_output(self, module: nn.Module, args: tuple, output: BaseModelOutputWithPast) -> None:
        self._taps.append(output.last_hidden_state)


def decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """The decoder's own layer list: the outermost ModuleList whose members hold one attention module each.

    Raises:
        UnsupportedModelError: there is none.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            owners = [{getattr(part, "layer_idx", None) for part in layer.modules()} - {None} for layer in module]
            if all(owner == {index} for index, owner in enumerate(owners)):
                return module
    raise UnsupportedModelError("no list of its modules holds one attention per layer, which drafters tap by number")
