"""Options of `wingbeat inspect`; does not import torch."""

from pathlib import Path

from pydantic import Field

from wingbeat.deployments.options.model_options import LoadOptions


class InspectConfig(LoadOptions):
    """Options of `wingbeat inspect`, except the folder, which is an argument."""

    model: Path | None = Field(
        None,
        description="Folder of the verifier to try the drafter with. If it is the inspected folder itself, the "
        "model's own multi-token prediction modules are tried.",
    )
