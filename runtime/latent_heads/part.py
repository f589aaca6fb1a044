"""Registers EAGLE-3 heads with compressed attention (MLA)."""

compressed_head = "wingbeat.runtime.latent_heads.latent_head:compressed_head"
