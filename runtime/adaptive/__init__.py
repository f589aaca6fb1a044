"""Adaptive speculation: levels to draft and nodes to verify, from measured costs and acceptance.

Without this folder every round drafts and verifies trees of the configured shape.
"""
