"""Endpoints that tokenize and detokenize without generating."""
