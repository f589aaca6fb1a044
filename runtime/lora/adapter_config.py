"""`adapter_config.json` of a LoRA adapter as peft writes it: what is served of it, and what is refused by name."""

import json
import math
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

CONFIG_FILE = "adapter_config.json"
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern"),
        *("layers_to_transform", "lora_dropout", "peft_type", "peft_version", "qalora_group_size", "revision"),
        *("target_modules", "task_type", "megatron_core", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "ensure_weight_tying", "runtime_config"),
    }
)
"""Fields that say how an adapter was made or found: what it does is in its tensors."""
_STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica", "true", "false"})
"""Ways of `init_lora_weights` that leave the base model's weights as they are."""


class AdapterError(ValueError):
    """An adapter cannot be served; one line that names its folder and what is wrong."""


class AdapterConfig(BaseModel):
    """The fields that decide what an adapter does."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: str
    r: int = Field(gt=0)
    lora_alpha: float = Field(allow_inf_nan=False)
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """Of the adapter of a linear layer, by the layer's path in the model."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What the product of its two matrices is multiplied by (rsLoRA: arXiv 2312.03732)."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(folder: Path) -> AdapterConfig:
    """The configuration of an adapter.

    Raises:
        AdapterError: it cannot be read, or asks for something that is not served; names the field.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise AdapterError(f"there is no folder {folder}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        config = AdapterConfig.model_validate(fields)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise AdapterError(f"{path}: {'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not JSON: {error}") from None
    if (problem := _unserved(config, fields)) is not None:
        raise AdapterError(f"{path}: {problem}")
    return config


def _unserved(config: AdapterConfig, fields: dict[str, Any]) -> str | None:
    if config.peft_type != "LORA":
        return f"peft_type is {config.peft_type}: LORA is served"
    if config.bias != "none":
        return f"bias is {config.bias}: none is served, the base model's biases stay as they are"
    if str(config.init_lora_weights if config.init_lora_weights is not None else True).lower() not in _STARTS:
        return (
            f"init_lora_weights is {config.init_lora_weights}, which changes the base model's weights: save the "
            "adapter converted to an ordinary one (peft's path_initial_model_for_weight_conversion)"
        )
    own = frozenset(AdapterConfig.model_fields)
    for name in sorted(fields.keys() - own - _HARMLESS):
        value = fields[name]
        if value not in (None, False, [], {}, "", 0):
            return f"{name} is {json.dumps(value)[:80]}, which is not served"
    return None


def _by_pattern(patterns: dict[str, Any], module: str, otherwise: Any) -> Any:
    """As peft finds it: the first pattern that the end of the path matches."""
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise AdapterError(f"pattern {pattern!r} of {CONFIG_FILE} is no expression: {error}") from None
    return otherwise
