"""Structured output: request fields, and the compiler of grammars in an engine's process."""
