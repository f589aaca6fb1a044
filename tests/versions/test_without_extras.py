"""The installed wheel with what it requires alone: what the tests' own environment has beside that may not be needed.

`make test-versions` runs the same steps with other versions of everything.
"""

import subprocess
from pathlib import Path

import pytest

from tests.versions.environments import STEPS, build_wheel, installed_alone, only_in_extras


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with only the wheel and the distributions that it requires."""
    folder = tmp_path_factory.mktemp("alone")
    return installed_alone(folder / "environment", build_wheel(folder))


def exercise(python: Path, step: str) -> None:
    done = subprocess.run([str(python), "-P", str(STEPS), step], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_environment_lacks_what_extras_bring(python: Path):
    extras = only_in_extras()
    assert {"pytest", "pillow", "onnx", "matplotlib"} & extras
    code = "from importlib.metadata import distributions\nprint(*(found.name for found in distributions()))"
    held = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "ray", "wingbeat"} <= set(held)
    assert not {name.lower() for name in held} & (extras - {"pip", "setuptools"})


@pytest.mark.slow
@pytest.mark.parametrize("step", ["package", "hub", "imports", "local"])
def test_a_new_user_needs_no_extra(python: Path, step: str):
    exercise(python, step)


@pytest.mark.slow
def test_what_needs_an_extra_names_it(python: Path):
    exercise(python, "missing_extras")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("step", ["served", "by_serve"])
def test_a_server_needs_no_extra(python: Path, step: str):
    exercise(python, step)
