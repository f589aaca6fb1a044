"""Sampling rules of requests that a drafter applies to its drafts."""
