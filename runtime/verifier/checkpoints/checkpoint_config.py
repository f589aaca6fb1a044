"""The config.json of a verifier's checkpoint: raw JSON fields, and the transformers config built from them.

`ConfigFile` does not import torch, so that most mistakes are reported within a second. `load_config` finds the
remaining mistakes with transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.runtime.folder_kinds import folder_problem, head_problem
from wingbeat.runtime.hugging_face import make_config
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_files import ModelCheckpointError, read_fields, tensor_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WITH_IMAGES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types that transformers registers as image-text-to-text models rather than causal LMs."""
WITH_AUDIO = ("qwen2_audio", "audioflamingo3", "glmasr")
"""Model types that transformers registers as sequence-to-sequence models."""
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ConfigFile:
    """Fields of a folder's config.json, with the checks that need only the file."""

    folder: Path
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "ConfigFile":
        """Reads and checks the file.

        Raises:
            ModelCheckpointError: the folder or file is absent or unreadable, or a field has an impossible value.
        """
        if (problem := folder_problem(folder)) is not None:
            raise ModelCheckpointError(f"model: {problem}; it must be a folder with a config.json")
        file = folder / "config.json"
        config = cls(folder, read_fields(file))
        config._check()
        return config

    @property
    def text(self) -> Mapping[str, Any]:
        """Fields of the language model; for a multimodal checkpoint, the fields of `text_config`."""
        return self.fields.get("text_config") or self.fields

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """Quantisation config; None if weights are not quantised."""
        return self.fields.get("quantization_config") or self.text.get("quantization_config")

    @property
    def quantiser(self) -> str | None:
        """Name of the quantisation method; None if weights are not quantised."""
        fields = self.quantization
        if fields is None:
            return None
        if fields.get("load_in_8bit") or fields.get("load_in_4bit"):
            return "bitsandbytes"
        return str(fields.get("quant_method"))

    @property
    def name(self) -> str:
        """Name of the architecture, for error messages."""
        names = self.fields.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else str(self.fields["model_type"])

    def size(self, name: str) -> int | None:
        """Returns an integer field of the language model.

        Returns None if the file does not set the field, so that the config class's default applies.
        """
        value = self.text.get(name)
        return value if isinstance(value, int) else None

    def _check(self) -> None:
        file, fields = self.folder / "config.json", self.fields
        for name in ("text_config", "quantization_config"):
            if not isinstance(fields.get(name) or {}, dict):
                raise ModelCheckpointError(f"{file}: {name} is {fields[name]!r}, it must be an object")
        if not isinstance(fields.get("model_type"), str):
            raise ModelCheckpointError(
                f"{file}: model_type is {fields.get('model_type')!r}, it must name an architecture"
            )
        if fields.get("is_encoder_decoder") is True:
            raise ModelCheckpointError(f"{self.name} is an encoder-decoder: only causal LMs can be verifiers")
        if self.quantization is not None and not isinstance(self.quantization, dict):
            raise ModelCheckpointError(f"{file}: quantization_config is {self.quantization!r}, it must be an object")
        # An unreadable generation config is an error here, because transformers would silently ignore it, and
        # generated texts would then end at other tokens.
        generation = self.folder / _GENERATION
        for path, found in ((file, fields), (generation, read_fields(generation) if generation.exists() else {})):
            if (problem := first_result("config_problem", found)) is not None:
                raise ModelCheckpointError(f"{path}: {problem}")


def load_config(file: ConfigFile) -> "PretrainedConfig":
    """Returns transformers' config object, for an architecture that transformers supports.

    Raises:
        ModelCheckpointError: the model type is unknown or not a causal LM, or transformers cannot read the config.
    """
    if (problem := head_problem(file.folder, tensor_files(file.folder))) is not None:
        raise ModelCheckpointError(problem)
    kind, config = file.fields["model_type"], make_config(file.fields, file.folder, file.name)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelCheckpointError(f"{file.name} is an encoder-decoder: only causal LMs can be verifiers")
    if type(config) not in auto_class(kind)._model_mapping:
        raise ModelCheckpointError(f"{file.name} (model_type {kind!r}) is no causal LM that transformers knows")
    return config


def auto_class(kind: str) -> Any:
    """Returns the transformers auto class that builds models of a model_type."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if kind in WITH_AUDIO:
        return AutoModelForSeq2SeqLM
    # Some families, such as mistral3, have no class for text alone.
    only_with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return AutoModelForImageTextToText if kind in {*WITH_IMAGES, *only_with_images} else AutoModelForCausalLM
