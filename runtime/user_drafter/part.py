"""Registers the drafter classes of users, which are given by their import paths."""

import importlib.util

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

drafter_kinds = (
    DrafterKind(
        "user",
        "wingbeat.runtime.user_drafter.user_drafter:load_user_drafter",
        find_problem="wingbeat.runtime.user_drafter.part:find_problem",
    ),
)


def find_problem(path: str) -> str | None:
    """Returns the problem if the class's package is missing on this machine, else None; imports nothing."""
    package = path.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"there is no module {package}; is its folder on PYTHONPATH?"
    return None
