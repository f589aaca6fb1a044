"""Recurrent and convolution states of layers that have them instead of, or beside, keys and values."""
