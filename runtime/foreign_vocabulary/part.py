"""Hooks for draft models whose vocabulary differs from the verifier's."""

shared_tokens = "wingbeat.runtime.foreign_vocabulary.intersection:shared_tokens"
