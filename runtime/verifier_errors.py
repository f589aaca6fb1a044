"""Exceptions that verifiers raise, importable without torch."""


class UnsupportedModelError(ValueError):
    """The architecture cannot be served without silent errors; the message names the architecture and the reason."""


class BackendLost(RuntimeError):
    """The verifier's backend is lost, through no fault of any request."""
