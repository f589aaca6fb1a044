"""Decides by measurement which of a head's possible conventions is right."""
