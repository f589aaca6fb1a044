"""Recurrent and convolution states of layers that have such states instead of, or in addition to, keys and values."""
