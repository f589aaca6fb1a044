"""What verifiers raise, by names that a process without torch has too."""


class UnsupportedModelError(ValueError):
    """The architecture cannot be served without silent errors; the message names it and says why."""


class BackendLost(RuntimeError):
    """What runs the verifier is gone, and none of its requests has to do with that."""
