"""Exceptions that verifiers raise; importing this file does not import torch."""


class UnsupportedModelError(ValueError):
    """A model's architecture cannot be served, or would be served with wrong results.

    The message names the architecture and the reason.
    """


class BackendLost(RuntimeError):
    """The verifier's backend has stopped working, and no request caused this."""
