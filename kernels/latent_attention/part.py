"""Hooks of attention over latents. Triton is imported when the kernel is first requested."""

kernels = dict.fromkeys(("store_latents", "keep_latents"), "wingbeat.kernels.latent_attention.triton")
cases = "wingbeat.kernels.latent_attention.comparison_case:CASES"
