"""EAGLE-3 heads of compressed attention (MLA)."""
