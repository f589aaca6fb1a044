"""The wheel holds what the tree holds: a package missing from the list is missing from the wheel only."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.versions.environments import build_wheel

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "runtime", "cluster", "deployments")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
TOP = "deployments/package"
DEMO = "wingbeat.demo_pair"
"""A package of data alone."""
MOST_BYTES = 16 * 10**6


def packages_of_the_tree() -> set[str]:
    """Every folder with Python files, by its import name; `deployments/package` is the package above them all."""
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return {".".join(("wingbeat", *folder.relative_to(ROOT).parts)) for folder in folders - {ROOT / TOP}} | {"wingbeat"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built of a copy, by what is installed."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_packages_list_equals_the_tree():
    assert set(SETUPTOOLS["packages"]) == packages_of_the_tree() | {DEMO}


def test_every_package_is_mapped_to_its_folder():
    folders = {f"wingbeat.{folder}": folder for folder in FOLDERS}
    assert SETUPTOOLS["package-dir"] == folders | {"wingbeat": TOP, DEMO: "examples/demo_pair"}


def test_top_level_folders_are_no_packages():
    # An importable top-level package named `kernels` would be taken for the Hugging Face library by transformers.
    assert not [folder for folder in FOLDERS if (ROOT / folder / "__init__.py").exists()]


def test_folders_below_are_packages():
    below = {path.parent for folder in FOLDERS for path in (ROOT / folder).glob("*/**/*.py")}
    assert not [folder for folder in below if not (folder / "__init__.py").exists()]


def test_an_unpacked_wheel_has_the_demo_pair_and_finds_it(wheel: Path, tmp_path: Path):
    assert wheel.stat().st_size < MOST_BYTES
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "from importlib.resources import files\n"
        "from wingbeat.runtime.demo import demo_pair\n"
        f"held = files('{DEMO}')\n"
        "for folder in demo_pair():\n"
        "    assert str(folder).startswith(sys.path[0]), folder\n"
        "    for name in ('config.json', 'model.safetensors'):\n"
        "        found = held / folder.name / name\n"
        "        print(len(found.read_bytes()), (folder / name).stat().st_size)\n"
    )
    # Without site, so that the tree's own installation is out of sight.
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.split()
    assert len(lines) == 8
    assert lines[::2] == lines[1::2]


def test_a_wheel_holds_every_file_of_the_packages_that_is_no_code(wheel: Path):
    """What a module opens beside itself, such as a page, is missing from a wheel unless it is named."""
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    data = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert not [path for path in data if f"wingbeat/{path.relative_to(ROOT)}" not in held]


def test_a_wheel_has_the_package_above_them_all_beside_them(wheel: Path):
    held = set(zipfile.ZipFile(wheel).namelist())
    assert "wingbeat/__init__.py" in held
    assert not [name for name in held if name.startswith("wingbeat/deployments/package")]
