"""The Dockerfile as instructions, for tests of its text and for the one that carries them out."""

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "Dockerfile"


class Step(NamedTuple):
    """An instruction of the Dockerfile."""

    name: str
    rest: str


def steps() -> list[Step]:
    """In order, each on one line and without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Step(*line.strip().split(" ", 1)) for line in joined.splitlines() if line.strip()]


def sent() -> list[str]:
    """Files and folders of the checkout that Docker sends to a build; all others stay behind."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line[1:] for line in lines if line.startswith("!")]


def words_of(rest: str) -> list[str]:
    """Words of an instruction that gives a program and its arguments as JSON."""
    return json.loads(rest[rest.index("[") :])
