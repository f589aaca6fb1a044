"""Products of which each row has the same bits in any batch."""
