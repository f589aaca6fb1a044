"""Drafters: their actors and processes, pools of them, and who replaces them."""
