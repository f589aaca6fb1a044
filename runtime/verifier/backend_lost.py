"""The error of a verifier that no request has broken; a process without torch can name it too."""


class BackendLost(RuntimeError):
    """What runs the verifier is gone, and none of its requests has to do with that."""
