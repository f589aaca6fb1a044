"""Speculation policy: chooses levels to draft and nodes to verify, by measured costs and acceptance."""
