"""Options of `wingbeat doctor`; does not import torch."""

from pydantic import Field

from wingbeat.deployments.local.engine import LocalConfig


class DoctorConfig(LocalConfig):
    """Options of `wingbeat doctor`."""

    load: bool = Field(True, description="Also load the model and its drafter and generate a few tokens.")
