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
    """Returns an error text if the package of the class at `path` is missing on this machine, else None. Imports
    nothing.
    """
    package = path.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"there is no module {package}; is its folder on PYTHONPATH?"
    return None
