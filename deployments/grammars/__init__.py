"""Grammars that answers must match: fields of requests, and what compiles them beside an engine."""
