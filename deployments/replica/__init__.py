"""Replicas of a verifier and its drafter, and the processes below them."""
