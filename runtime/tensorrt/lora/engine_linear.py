"""Config fields and limits for LoRA adapters in an exported verifier."""

from pydantic import BaseModel, ConfigDict, Field


class EngineLinear(BaseModel):
    """A linear layer that accepts adapters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Module path in the model."""
    inputs: int = Field(ge=1)
    outputs: int = Field(ge=1)


FIELDS = {"lora_linears": (tuple[EngineLinear, ...], ())}
"""Config field that lists the layers."""
_HELD = "LoRA adapters that an engine holds at once; 0 leaves no room for any."
LIMITS = {
    "max_loras": (int, Field(0, ge=0, description=_HELD)),
    "max_lora_rank": (int, Field(16, ge=1, description="Highest rank of an adapter.")),
}
"""Limits of the adapters in the verifier's graph."""
