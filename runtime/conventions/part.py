"""Registers the choice of conventions by measurement; imports the measurement on use."""

choose_convention = "wingbeat.runtime.conventions.readings:choose_convention"
