"""Hooks for draft models with another vocabulary."""

shared_tokens = "wingbeat.runtime.foreign_vocabulary.intersection:shared_tokens"
