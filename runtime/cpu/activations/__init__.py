"""Rounds activations to int8 before they are multiplied by packed weights."""
