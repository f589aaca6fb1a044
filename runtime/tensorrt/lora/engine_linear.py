"""Layers of an exported verifier that have room for adapters, and how much of it a graph has."""

from pydantic import BaseModel, ConfigDict, Field


class EngineLinear(BaseModel):
    """A linear layer that adapters may act on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """In the model."""
    inputs: int = Field(ge=1)
    outputs: int = Field(ge=1)


FIELDS = {"lora_linears": (tuple[EngineLinear, ...], ())}
"""The layers that have room."""
_HELD = "LoRA adapters that an engine holds at once; 0 leaves no room for any."
LIMITS = {
    "max_loras": (int, Field(0, ge=0, description=_HELD)),
    "max_lora_rank": (int, Field(16, ge=1, description="Highest rank of an adapter.")),
}
"""Room for adapters in the verifier's graph."""
