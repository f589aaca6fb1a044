"""Runtime part: attention over latents as fused steps; imported when a model's layers are fused."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

attentions = "wingbeat.runtime.latent_attention.half:ATTENTIONS"


def extend_model(loaded: "LoadedModel", config: "EngineConfig") -> None:
    """Makes layers of a GPU store latents in place of keys and values."""
    has_latents = any(hasattr(module, "kv_a_proj_with_mqa") for module in loaded.model.modules())
    if has_latents and loaded.device.type != "cpu" and not loaded.deterministic:
        from wingbeat.runtime.latent_attention.kept import keep_latents

        keep_latents(loaded)
