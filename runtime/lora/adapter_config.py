"""Reads peft's `adapter_config.json` of a LoRA adapter. For an unsupported field, an error is raised that names the
field.
"""

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wingbeat.runtime.lora.adapter import CONFIG_FILE, AdapterError

_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode"),
        *("lora_dropout", "peft_type", "peft_version", "qalora_group_size", "revision", "task_type"),
        *("megatron_core", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "ensure_weight_tying", "runtime_config"),
    }
)
"""Fields that state how an adapter was created or where it comes from, and do not change the meaning of its tensors."""
_STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica", "true", "false"})
"""Values of `init_lora_weights` that leave the base model's weights unchanged."""


_Rank = Annotated[int, Field(gt=0, strict=True)]
_Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
_Flag = Annotated[bool, Field(strict=True)]
_Names = list[str] | str | None
ALL_LINEAR = "all-linear"
"""Value of `target_modules` in peft that means every linear layer except the output head."""


class AdapterConfig(BaseModel):
    """The fields that determine an adapter's effect."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: str
    r: _Rank
    lora_alpha: _Alpha
    use_rslora: _Flag = False
    rank_pattern: dict[str, _Rank] = {}
    alpha_pattern: dict[str, _Alpha] = {}
    target_modules: _Names = None
    """Path suffixes of the linear layers with an adapter, or a regular expression for whole paths; None if the field
    is absent.
    """
    exclude_modules: _Names = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: _Names = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """Returns the adapter's rank at a linear layer, given the layer's path in the model."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Returns the factor that multiplies the product of an adapter's two matrices (rsLoRA: arXiv 2312.03732)."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether target_modules includes a linear layer, by peft's rules; False if the field is absent."""
        if self.target_modules is None or _is_named(self.exclude_modules, module):
            return False
        if not (self.target_modules == ALL_LINEAR or _is_named(self.target_modules, module)):
            return False
        chosen = self.layers_to_transform
        # The layer number is checked only if the target modules are a list, as in peft.
        if chosen in (None, []) or isinstance(self.target_modules, str):
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern or [r"[^.]*"]
        found = next((m for one in patterns if (m := _search(rf".*\.{one}\.(\d+)\.", module, one))), None)
        return found is not None and int(found[1]) in ([chosen] if isinstance(chosen, int) else chosen)


def read_config(folder: Path) -> AdapterConfig:
    """Reads and checks an adapter's configuration.

    Raises:
        AdapterError: the file cannot be read, or uses an unsupported field; the message names the field.
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
        return f"peft_type is {config.peft_type}: only LORA is supported"
    if config.bias != "none":
        return f"bias is {config.bias}: only none is supported, because the base model's biases are not changed"
    if str(config.init_lora_weights if config.init_lora_weights is not None else True).lower() not in _STARTS:
        return (
            f"init_lora_weights is {config.init_lora_weights}, which changes the base model's weights: save the "
            "adapter converted to an ordinary one (peft's path_initial_model_for_weight_conversion)"
        )
    own = frozenset(AdapterConfig.model_fields)
    for name in sorted(fields.keys() - own - _HARMLESS):
        value = fields[name]
        if value not in (None, False, [], {}, "", 0):
            return f"{name} is {json.dumps(value)[:80]}, which is not supported"
    return None


def _by_pattern(patterns: dict[str, Any], module: str, otherwise: Any) -> Any:
    """Returns the value of the first pattern that matches the end of the path, as peft does; else `otherwise`."""
    for pattern, value in patterns.items():
        if _search(rf"^(.*\.)?({pattern})$", module, pattern):
            return value
    return otherwise


def _is_named(names: _Names, module: str) -> bool:
    if isinstance(names, str):
        return _search(f"^(?:{names})$", module, names) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _search(expression: str, module: str, pattern: str) -> "re.Match[str] | None":
    try:
        return re.match(expression, module)
    except (re.error, OverflowError) as error:
        raise AdapterError(f"pattern {pattern!r} of {CONFIG_FILE} is no expression: {error}") from None
