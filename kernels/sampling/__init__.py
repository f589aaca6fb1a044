"""Choosing tokens: processors, filters, noise."""
