"""Shares of GPUs, by the GPUs there are, for settings that give none."""
