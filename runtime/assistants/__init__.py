"""Drafting with heads that read the verifier's keys and values (Gemma 4's assistants)."""
