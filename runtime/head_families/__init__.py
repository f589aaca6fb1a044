"""Families of draft heads other than EAGLE-1 and EAGLE-3."""
