"""Layers of an exported verifier that have room for adapters."""

from pydantic import BaseModel, ConfigDict, Field


class EngineLinear(BaseModel):
    """A linear layer that adapters may act on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """In the model."""
    inputs: int = Field(ge=1)
    outputs: int = Field(ge=1)
