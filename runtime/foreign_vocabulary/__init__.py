"""Drafting with a model whose vocabulary differs from the verifier's."""
