"""Requests that were written for other servers."""
