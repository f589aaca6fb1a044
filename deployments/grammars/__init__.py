"""Structured output: fields of requests, and the compiler of grammars beside an engine."""
