"""How the fake GPU's verifiers store latents."""

from wingbeat.runtime.latent_attention.kept import keep_latents

PREPARED_FOR_GPU = {"latents": keep_latents}
