"""Draft heads: their forward passes, configs and checkpoint files."""
