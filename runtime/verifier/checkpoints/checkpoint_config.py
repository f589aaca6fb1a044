"""The config.json of a verifier's checkpoint: what it says as plain JSON, and as the class of transformers for it.

`ConfigFile` loads no torch, so that most mistakes are told within a second; `load_config` is the authority.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wingbeat.runtime import config_numbers
from wingbeat.runtime.folder_kinds import folder_problem, head_problem
from wingbeat.runtime.hugging_face import make_config
from wingbeat.runtime.tensor_files import ModelCheckpointError, read_fields, tensor_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WITH_IMAGES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Models that transformers counts among those from images to text, and not among the causal LMs that they are."""
WITH_AUDIO = ("qwen2_audio", "audioflamingo3", "glmasr")
"""Those that it counts among the models from one sequence to another."""
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ConfigFile:
    """config.json of a folder, checked as far as the file alone tells."""

    folder: Path
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "ConfigFile":
        """Read and check the file.

        Raises:
            ModelCheckpointError: the folder or the file is not there or cannot be read, or a field cannot be right.
        """
        if (problem := folder_problem(folder)) is not None:
            raise ModelCheckpointError(f"model: {problem}; it must be a folder with a config.json")
        file = folder / "config.json"
        config = cls(folder, read_fields(file))
        config._check()
        return config

    @property
    def text(self) -> Mapping[str, Any]:
        """The fields of the language model: those of `text_config` where the checkpoint is multimodal."""
        return self.fields.get("text_config") or self.fields

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """How the weights are quantised; None where they are not."""
        return self.fields.get("quantization_config") or self.text.get("quantization_config")

    @property
    def quantiser(self) -> str | None:
        """What the weights are quantised by, None where they are not."""
        fields = self.quantization
        if fields is None:
            return None
        if fields.get("load_in_8bit") or fields.get("load_in_4bit"):
            return "bitsandbytes"
        return str(fields.get("quant_method"))

    @property
    def name(self) -> str:
        """The architecture, as errors call it."""
        names = self.fields.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else str(self.fields["model_type"])

    def size(self, name: str) -> int | None:
        """A field of the language model that is a number; None where the file leaves it to the class."""
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
        # transformers passes a generation config over where it cannot read it, and the text would have another end.
        generation = self.folder / _GENERATION
        for path, found in ((file, fields), (generation, read_fields(generation) if generation.exists() else {})):
            if (problem := config_numbers.problem(found)) is not None:
                raise ModelCheckpointError(f"{path}: {problem}")


def load_config(file: ConfigFile) -> "PretrainedConfig":
    """The configuration as transformers reads it, of an architecture that it knows.

    Raises:
        ModelCheckpointError: it is of an unknown kind, no causal LM, or transformers cannot read it.
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
    """transformers' own class that makes models of a model_type."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    if kind in WITH_AUDIO:
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if kind in WITH_IMAGES else AutoModelForCausalLM
