"""Options of `wingbeat inspect`; loads no torch."""

from pathlib import Path

from pydantic import Field

from wingbeat.deployments.options.model_options import LoadOptions


class InspectConfig(LoadOptions):
    """Options of `wingbeat inspect`, the folder apart."""

    model: Path | None = Field(
        None,
        description="Folder of the verifier to try the drafter with; a model's own, to try its prediction modules.",
    )
