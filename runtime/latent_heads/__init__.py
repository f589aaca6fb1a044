"""EAGLE-3 heads with compressed attention (MLA)."""
