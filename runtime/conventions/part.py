"""Measured readings of heads; imports what measures when it is asked."""

choose_convention = "wingbeat.runtime.conventions.readings:choose_convention"
