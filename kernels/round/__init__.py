"""Ends of a verifier's round: what is believed of drafted trees, where nodes lie, and what an accepted path leaves."""
