"""Routes that do not generate text."""
