"""Speculation policy: levels to draft and nodes to verify, from measured costs and acceptance; pure functions."""
