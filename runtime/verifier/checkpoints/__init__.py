"""Checkpoints on disk: tensor files and configurations."""
