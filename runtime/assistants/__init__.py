"""Drafting with heads that attend to the verifier's keys and values (Gemma 4's assistants)."""
