"""Answers of the HTTP API: whole bodies, streams, and details about tokens."""
