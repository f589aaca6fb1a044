"""Draft heads: their mathematics, configs and checkpoint files."""
