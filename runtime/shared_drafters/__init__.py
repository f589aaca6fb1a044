"""Drafters that several verifiers share."""
