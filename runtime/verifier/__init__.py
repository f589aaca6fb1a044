"""The base model on its device."""
