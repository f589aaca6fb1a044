"""What is raised where a model's layers are of no kind that can be served."""


class UnsupportedModelError(ValueError):
    """The architecture cannot be served without silent errors; the message names it and says why."""
