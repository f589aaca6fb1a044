"""Channels between the processes of verifier and drafter."""
