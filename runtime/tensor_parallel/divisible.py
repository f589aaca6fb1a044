"""Checks whether a model can be divided among ranks, from its configuration alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wingbeat.runtime.refusals import Feature, refuse
from wingbeat.runtime.tensor_parallel.group import NO_PLAN, RANKS, REFUSED
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


def check_divisible(file: ConfigFile, config: "PretrainedConfig", size: int) -> None:
    """Raises an error for models that cannot be divided into equal parts.

    Args:
        config: result of `load_config` for the file.

    Raises:
        ValueError: one line that names the setting and the property of the model that conflicts with it.
    """
    text, setting = config.get_text_config(), f"tensor_parallel_size is {size}"
    if file.quantization is not None:
        refuse({RANKS: setting, Feature.QUANTISED: f"{file.name} is quantised"}, REFUSED)
    if not getattr(text, "base_model_tp_plan", None):
        refuse({RANKS: setting, NO_PLAN: f"transformers has no tensor parallel plan for {file.name}"}, REFUSED)
    check_sizes({name: getattr(text, name, None) for name in _DIVIDED}, file.name, size)


def check_sizes(fields: Mapping[str, Any], model: str, size: int) -> None:
    """Raises an error if the number of ranks does not divide the sizes that a model's config states. Loads nothing.

    Raises:
        ValueError: a size is not divisible; the message names the setting and the size.
    """
    for name in _DIVIDED:
        value = fields.get(name)
        if isinstance(value, int) and value % size:
            raise ValueError(f"tensor_parallel_size is {size}: it must divide {name} of {model}, which is {value}")
