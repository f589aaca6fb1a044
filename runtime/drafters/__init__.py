"""Drafters: the `Drafter` interface, EAGLE drafting, and the worker that serves verifiers."""
