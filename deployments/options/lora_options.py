"""What an operator can set about LoRA adapters."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.runtime.lora.adapter_config import AdapterError, read_config
from wingbeat.runtime.lora.names import name_problem
from wingbeat.runtime.lora.settings import MOST_LORAS, MOST_RANK, RANK


class LoraOptions(ModelOptions):
    """The part of `AppConfig` that says which adapters are served."""

    lora_modules: dict[str, Path] | None = Field(
        None,
        description="LoRA adapters by the name that requests give as their model: name=folder, several separated by "
        "commas, or a JSON object.",
    )
    lora_update_dir: Path | None = Field(
        None,
        description="Folder below which operators may load adapters while the server runs "
        "(/v1/load_lora_adapter); none serves no such path.",
    )
    max_loras: int = Field(
        8,
        ge=1,
        le=MOST_LORAS,
        description="Adapters an engine holds at once; others are read again when needed.",
    )
    max_lora_rank: int = Field(RANK, ge=1, le=MOST_RANK, description="Highest rank of an adapter.")

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("{"):
            try:
                return json.loads(value)
            except ValueError as error:
                raise ValueError(f"is not JSON: {error}") from None
        pairs = [part.strip().partition("=") for part in value.split(",")]
        bad = [name for name, sign, folder in pairs if not (name and sign and folder)]
        if bad:
            raise ValueError(f"{bad[0]!r} must read name=folder")
        names = [name for name, _, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError("two adapters have the same name")
        return {name: folder for name, _, folder in pairs}

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        for name, folder in (self.lora_modules or {}).items():
            if (problem := name_problem(name)) is not None:
                raise ValueError(f"lora_modules: the name {name!r} {problem}")
            try:
                read_config(folder)
            except AdapterError as error:
                raise ValueError(f"lora_modules: adapter {name!r}: {error}") from None
        if self.lora_update_dir is not None and not self.lora_update_dir.is_dir():
            raise ValueError(f"lora_update_dir is {str(self.lora_update_dir)!r}: must be a directory")
        return self

    def check_adapters(self, model_name: str) -> None:
        """Raises ValueError for a name that the base model has."""
        if model_name in (self.lora_modules or {}):
            raise ValueError(f"lora_modules: the name {model_name!r} is that of the base model")

    def serves_adapters(self) -> bool:
        """Whether linear layers have room for adapters."""
        return bool(self.lora_modules) or self.lora_update_dir is not None
