"""Runtime part: attention over latents as fused steps; imported when a model's layers are fused."""

attentions = "wingbeat.runtime.latent_attention.half:ATTENTIONS"
