"""Heads of compressed attention among the kinds of drafters."""

from wingbeat.runtime.latent_heads.latent_head import LatentEagleConfig

CONFIGS = {"latent": LatentEagleConfig}
