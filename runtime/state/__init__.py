"""Recurrent and convolution state of layers that have it in place of keys and values, or beside them."""
