"""Training of MTP modules."""
