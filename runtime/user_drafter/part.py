"""Classes of a user's own."""

import importlib.util

from wingbeat.runtime.drafters.drafter_kind import DrafterKind


def drafter_kinds() -> tuple[DrafterKind, ...]:
    """Named by an import path."""
    module = "wingbeat.runtime.user_drafter"
    build, check = f"{module}.user_drafter:load_user_drafter", f"{module}.user_drafter:check_user_drafter"
    return (DrafterKind("user", build, check, find_problem=f"{module}.part:find_problem"),)


def find_problem(path: str) -> str | None:
    """Whether the class's package is missing here; imports nothing."""
    package = path.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"there is no module {package}; is its folder on PYTHONPATH?"
    return None
