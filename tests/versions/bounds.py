"""The lowest version of each direct dependency that pyproject.toml allows, as requirements for pip."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
_PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>\S+)", re.MULTILINE)


def dependencies(root: Path = ROOT) -> list[Requirement]:
    """Dependencies of an installation without extras."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in project["dependencies"]]


def pins(root: Path = ROOT) -> dict[str, str]:
    """Versions that constraints/cpu.txt fixes: torch's, of which one build has no CUDA."""
    return {match["name"]: match["version"] for match in _PIN.finditer((root / "constraints" / "cpu.txt").read_text())}


def lowest(required: list[Requirement], pinned: dict[str, str]) -> list[str]:
    """Each requirement at its lower bound; what is pinned, at its pin.

    Raises:
        ValueError: one has no lower bound, so that nothing says from where on it works.
    """
    return [f"{_named(one)}=={pinned.get(one.name) or lower_bound(one)}" for one in required]


def lower_bound(requirement: Requirement) -> str:
    """The version behind `>=`."""
    found = [spec.version for spec in requirement.specifier if spec.operator == ">="]
    if len(found) != 1:
        raise ValueError(f"{requirement}: must have one lower bound, as >=")
    return found[0]


def _named(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}"
