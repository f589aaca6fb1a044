"""Rounds of a verifier and a drafter in one process, each captured whole as one CUDA graph."""
