"""Incremental parsers that find reasoning and tool calls in a model's text."""
