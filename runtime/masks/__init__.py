"""Masks of allowed tokens: bad words of several tokens, and masks of a round's trees."""
