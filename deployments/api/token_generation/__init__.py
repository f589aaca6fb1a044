"""Endpoints of vLLM that take token ids and return token ids."""
