"""Drafters that all verifiers of an application share."""
