"""Finds a model's mixers (layer parts with a recurrent state) and adapts them to an engine's rounds.

transformers' mixers read and write states through methods of transformers' cache. Two passes over a few tokens
determine which modules do so, the shapes of their states, and the linear layers at their edges.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from wingbeat.runtime.refusals import problem
from wingbeat.runtime.state.mixer import CACHE_ARGUMENTS, Mixer
from wingbeat.runtime.state.model_states import ModelStates
from wingbeat.runtime.state.pool import LayerState, StatePart
from wingbeat.runtime.state.settings import RANKS, REFUSED, STATES
from wingbeat.runtime.state.tree_mixer import TreeMixer
from wingbeat.runtime.verifier_errors import UnsupportedModelError

_READS = {"get_conv_state", "get_recurrent_state"}


class RememberedStates:
    """State shapes found in transformers' cache, by layer."""

    def __init__(self, states: list[LayerState]) -> None:
        self.states = states

    def install(self, model: PreTrainedModel, attention: str, whole: bool) -> ModelStates:
        """See `Remembered.install`; adapts the layers' mixers to rounds."""
        if not whole:
            said = {STATES: "its layers keep recurrent states", RANKS: "tensor_parallel_size is above 1"}
            raise UnsupportedModelError(problem(said, REFUSED))
        return ModelStates(install_mixers(model, self.states, attention))


def remembered_states(layers: list[object]) -> RememberedStates | None:
    """Returns the states in the layers of a cache that a pass has filled; None if no layer has a state."""
    states = [
        LayerState(index, tuple(_parts(layer)))
        for index, layer in enumerate(layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin)
    ]
    return RememberedStates(states) if states else None


def _parts(layer: LinearAttentionCacheLayerMixin) -> list[StatePart]:
    kinds = ((False, layer.conv_states), (True, layer.recurrent_states))
    return [
        StatePart(recurrent, index, tuple(state.shape[1:]), state.dtype)
        for recurrent, states in kinds
        for index, state in states.items()
        if state is not None
    ]


@torch.inference_mode()
def install_mixers(model: PreTrainedModel, states: list[LayerState], attention: str) -> tuple[Mixer, ...]:
    """Adapts a model's mixers to rounds; all other changes to the model must be made before.

    Args:
        attention: name of the model's attention function, which is restored afterwards.

    Raises:
        UnsupportedModelError: a layer with a state has no mixer of a supported kind.
    """
    modules = _mixer_modules(model)
    unknown = [state.layer for state in states if state.layer not in modules]
    if unknown:
        raise UnsupportedModelError(
            f"layers {unknown} keep recurrent or convolution state by code of their own, which does not read it from "
            "transformers' cache"
        )
    edges = _edges(model, [module for state in states for module in modules[state.layer]], attention)
    # Several mixers of a layer share the layer's state; each mixer writes a different part of the state.
    return tuple(
        (TreeMixer if TreeMixer.fits(module, state) else Mixer)(module, state, *edges[module])
        for state in states
        for module in modules[state.layer]
    )


def _mixer_modules(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Finds, by layer, the modules whose forward reads a state from the cache."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        layer, forward = getattr(module, "layer_idx", None), inspect.unwrap(type(module).forward)
        names = inspect.signature(forward).parameters
        reads = _READS & set(forward.__code__.co_names) and any(name in names for name in CACHE_ARGUMENTS)
        if isinstance(layer, int) and reads:
            found.setdefault(layer, []).append(module)
    return found


def _edges(
    model: PreTrainedModel, mixers: list[nn.Module], attention: str
) -> dict[nn.Module, tuple[list[nn.Linear], nn.Linear | None]]:
    """Returns the linear layers at the edges of each mixer.

    These are the layers that multiply the mixer's unmodified input, and the layer whose output the mixer returns (None
    if there is none).
    """
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, object] = {}

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs[module] = args[0] if args else kwargs["hidden_states"]

    def leave(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        outputs[module] = output

    linears = {mixer: [part for part in mixer.modules() if isinstance(part, nn.Linear)] for mixer in mixers}
    hooks = []
    for part in (part for mixer in mixers for part in (mixer, *linears[mixer])):
        hooks.append(part.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(part.register_forward_hook(leave, with_kwargs=True))
    model.set_attn_implementation("eager")
    try:
        token_ids = torch.arange(1, 4, device=next(model.parameters()).device)[None]
        model(input_ids=token_ids, use_cache=False)
    finally:
        model.set_attn_implementation(attention)
        for hook in hooks:
            hook.remove()
    return {
        mixer: (
            [linear for linear in linears[mixer] if inputs.get(linear) is inputs[mixer]],
            next((linear for linear in linears[mixer] if outputs.get(linear) is outputs[mixer]), None),
        )
        for mixer in mixers
    }
