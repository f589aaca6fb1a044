"""Channels between the processes of a verifier and its drafter, and between a replica and its engine."""
