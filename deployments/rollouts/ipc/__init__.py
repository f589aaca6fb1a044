"""Weights that a trainer shares with an engine on the same GPU, as handles of CUDA IPC."""
