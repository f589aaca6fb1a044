"""Verifier and drafter as replicas."""
