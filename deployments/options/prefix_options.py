"""What an operator can set about saved prefixes."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.runtime.refusals import Feature


class PrefixOptions(ModelOptions):
    """The part of `AppConfig` that says where saved prefixes are kept, and how many."""

    prefix_dir: Path | None = Field(
        None,
        description="Folder in which every engine keeps saved prefixes, such as system prompts (/v1/prefixes), and "
        "from which it reads them when it starts; none keeps them in memory alone.",
    )
    max_pinned_tokens: int | None = Field(
        None, ge=0, description="Tokens of saved prefixes an engine holds; none takes a quarter of its KV blocks."
    )

    @model_validator(mode="after")
    def _check_prefix_dir(self) -> Self:
        if self.prefix_dir is not None and self.prefix_dir.exists() and not self.prefix_dir.is_dir():
            raise ValueError(f"prefix_dir is {str(self.prefix_dir)!r}: must be a directory, or not there yet")
        return self

    def asked(self) -> dict[str, tuple[bool, str]]:
        return super().asked() | {Feature.PREFIX_DIR: (self.prefix_dir is not None, "prefix_dir is given")}
