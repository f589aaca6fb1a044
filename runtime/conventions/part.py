"""Registers the choice of conventions by measurement; the measuring code is imported on first use."""

choose_convention = "wingbeat.runtime.conventions.readings:choose_convention"
