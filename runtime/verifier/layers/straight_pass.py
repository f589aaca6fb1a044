"""A known causal LM's pass over layers that are one step, without what transformers does around each of its modules.

That takes a tenth of a millisecond and more, whatever the model's size: of a small model's pass a good part.
"""

from functools import cache
from typing import Any

from torch import Tensor, nn

from wingbeat.runtime.round.rows import ROWS_KEYWORD
from wingbeat.runtime.verifier.layers.cpu_layers import KNOWN_DECODERS, LayersAtOnce

_KNOWN_INPUTS = {"input_ids", "position_ids", "logits_to_keep", ROWS_KEYWORD}


@cache
def _is_known(kind: type[nn.Module]) -> bool:
    """Whether a class is the causal LM around a known decoder: decoder, rows to keep, output matrix, nothing else."""
    decoder = f"{kind.__module__}.{kind.__qualname__}".replace("ForCausalLM", "Model")
    return decoder in KNOWN_DECODERS and kind.__qualname__.endswith("ForCausalLM")


def goes_straight(model: nn.Module, layers: nn.ModuleList, inputs: dict[str, Any]) -> bool:
    """Whether `straight_logits` is what the model makes of the inputs; asked within `LayersAtOnce.entered`."""
    if not (isinstance(layers, LayersAtOnce) and layers.is_one_step and _is_known(type(model))):
        return False
    around = (model, model.model)
    watched = any(one._forward_hooks or one._forward_pre_hooks or "forward" in one.__dict__ for one in around)
    return not watched and inputs.keys() <= _KNOWN_INPUTS


def straight_logits(model: nn.Module, layers: LayersAtOnce, inputs: dict[str, Any]) -> Tensor:
    """Logits [1, num_rows, vocab_size], as the code of the model's class computes them."""
    decoder, rows = model.model, inputs[ROWS_KEYWORD]
    hidden = decoder.embed_tokens(inputs["input_ids"])
    rotations = decoder.rotary_emb(hidden, position_ids=inputs["position_ids"])
    hidden = decoder.norm(layers.run_all(hidden, position_embeddings=rotations, **{ROWS_KEYWORD: rows}))
    keep = inputs["logits_to_keep"]
    return model.lm_head(hidden if isinstance(keep, int) else hidden[:, keep])
