"""Which models can be divided among ranks; read from the configuration alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wingbeat.runtime.refusals import Feature, refuse
from wingbeat.runtime.tensor_parallel.group import NO_PLAN, RANKS, REFUSED
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")


def check_divisible(file: ConfigFile, config: "PretrainedConfig", size: int) -> None:
    """Refuse what would not be divided, or not evenly.

    Args:
        config: what `load_config` made of the file.

    Raises:
        ValueError: one line that names the setting, and what of the model is in its way.
    """
    text, setting = config.get_text_config(), f"tensor_parallel_size is {size}"
    if file.quantization is not None:
        refuse({RANKS: setting, Feature.QUANTISED: f"{file.name} is quantised"}, REFUSED)
    if not getattr(text, "base_model_tp_plan", None):
        refuse({RANKS: setting, NO_PLAN: f"transformers has no tensor parallel plan for {file.name}"}, REFUSED)
    check_sizes({name: getattr(text, name, None) for name in _DIVIDED}, file.name, size)


def check_sizes(fields: Mapping[str, Any], model: str, size: int) -> None:
    """Refuse ranks that do not divide the sizes of a model, as far as its fields tell; loads nothing.

    Raises:
        ValueError: names the setting and the size.
    """
    for name in _DIVIDED:
        value = fields.get(name)
        if isinstance(value, int) and value % size:
            raise ValueError(f"tensor_parallel_size is {size}: it must divide {name} of {model}, which is {value}")
