"""Batch-invariant matrix products: the bits of a result row do not depend on the other rows."""
