"""EAGLE-3 heads of compressed attention (MLA)."""

compressed_head = "wingbeat.runtime.latent_heads.latent_head:compressed_head"
