"""Figures of engines among the metrics of Ray."""
