"""Checks a model's class and config, to report reasons that a failed comparison of logits would not show."""

import inspect
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from wingbeat.runtime.parts import first_result
from wingbeat.runtime.verifier.layers.mask_shape import MOST_POSITIONS
from wingbeat.runtime.verifier.layers.model_part import Remembered
from wingbeat.runtime.verifier_errors import UnsupportedModelError

logger = logging.getLogger(__name__)


_CACHED = ("keys", "values")


class CacheKinds(NamedTuple):
    """Kinds of data that transformers caches for a model's layers."""

    remembered: Remembered | None
    """Adapter for layers that cache other state than keys and values; None if no layer does."""
    without_attention: frozenset[int]
    """Layers that hold no keys and values."""


def check_architecture(model: PreTrainedModel) -> None:
    """Refuses a model whose code needs something other than keys, values and positions.

    Raises:
        UnsupportedModelError: the model is refused; the message does not contain the model's name.
    """
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder-decoder: only causal LMs can be verifiers")
    by_code = any("alibi" in name for module in model.modules() for name in vars(type(module)))
    if getattr(config, "alibi", by_code):
        raise UnsupportedModelError("it biases attention by distance (ALiBi), which our attention function does not do")
    if model.get_input_embeddings() is None or model.get_output_embeddings() is None:
        raise UnsupportedModelError("it has no token embedding, or no output matrix, that transformers can find")


def check_keywords(model: PreTrainedModel) -> None:
    """Refuses a forward method that does not accept the arguments of a flattened batch.

    Raises:
        UnsupportedModelError: the model is refused; the message does not contain the model's name.
    """
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise UnsupportedModelError(
            "its forward takes no position_ids: the rows of several sequences and the nodes of a token tree cannot be "
            "told their positions"
        )
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise UnsupportedModelError(
            "its forward takes no further keywords: an attention function cannot be told of the batch"
        )


@torch.inference_mode()
def check_cache(model: PreTrainedModel) -> CacheKinds:
    """Returns the kinds of data that layers cache; refuses all but keys, values and supported recurrent states.

    Raises:
        UnsupportedModelError: the model is refused; the message does not contain the model's name.
    """
    model.set_attn_implementation("eager")
    token_ids = torch.arange(1, 4, device=next(model.parameters()).device)[None]
    output = model(input_ids=token_ids, use_cache=True)
    cache = output.get("past_key_values")
    layers = list(getattr(cache, "layers", None) or [])
    indexed = [index for index, layer in enumerate(layers) if hasattr(layer, "indexer_keys")]
    if indexed:
        raise UnsupportedModelError(
            f"{_which(indexed, layers)} keep an index beside keys and values, to attend to chosen keys only: sparse "
            "attention is not in our attention function"
        )
    for index, layer in enumerate(layers):
        parts = () if isinstance(layer, LinearAttentionCacheLayerMixin) else vars(layer).items()
        if odd := [name for name, part in parts if name not in _CACHED and isinstance(part, Tensor) and part.dim() > 1]:
            raise UnsupportedModelError(
                f"layer {index} keeps {', '.join(odd)} beside keys and values, which our attention does not read"
            )
    if cache is None and (output.get("state") is not None or output.get("cache_params") is not None):
        raise UnsupportedModelError("it keeps recurrent state in place of keys and values")
    remembered = first_result("remembered", layers)
    recurrent = [index for index, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if recurrent and remembered is None:
        raise UnsupportedModelError(f"{_which(recurrent, layers)} keep recurrent state of a kind that is not supported")
    bare = frozenset(index for index, layer in enumerate(layers) if not isinstance(layer, CacheLayerMixin))
    return CacheKinds(remembered, bare)


def _which(indices: list[int], layers: list[object]) -> str:
    return "its layers" if len(indices) == len(layers) else f"layers {indices}"


def position_limit(model: PreTrainedModel) -> int:
    """Returns the number of positions up to which rotary angles do not depend on the lengths of the sequences.

    The result is at most the model's number of positions.
    """
    config = model.config.get_text_config()
    most = min(getattr(config, "max_position_embeddings", None) or MOST_POSITIONS, MOST_POSITIONS)
    # Beyond longrope's original length, the longest sequence of a batch would change the rotation of all sequences.
    limits = [
        rope["original_max_position_embeddings"]
        for rope in _ropes(config)
        if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings")
    ]
    limit = min([most, *limits])
    if limit < most:
        logger.warning(
            "%s: longrope changes its angles from position %d on, so the model is served up to that position",
            type(model).__name__,
            limit,
        )
    return limit


def _ropes(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yields sets of rope parameters: the top-level set, and the sets by kind of layer if the config has any."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))
