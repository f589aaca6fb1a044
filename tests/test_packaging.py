"""The wheel holds what the tree holds: a package missing from the list is missing from the wheel only."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "runtime", "cluster", "deployments")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_of_the_tree() -> set[str]:
    """Every folder with Python files, by its import name."""
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    return {".".join(("wingbeat", *folder.relative_to(ROOT).parts)) for folder in folders}


def test_the_packages_list_equals_the_tree():
    assert set(SETUPTOOLS["packages"]) == packages_of_the_tree()


def test_every_package_is_mapped_to_its_folder():
    assert SETUPTOOLS["package-dir"] == {f"wingbeat.{folder}": folder for folder in FOLDERS}


def test_top_level_folders_are_no_packages():
    # An importable top-level package named `kernels` would be taken for the Hugging Face library by transformers.
    assert not [folder for folder in FOLDERS if (ROOT / folder / "__init__.py").exists()]


def test_folders_below_are_packages():
    below = {path.parent for folder in FOLDERS for path in (ROOT / folder).glob("*/**/*.py")}
    assert not [folder for folder in below if not (folder / "__init__.py").exists()]


def test_the_wheel_holds_every_file_that_is_no_code():
    missing = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                package = ".".join(("wingbeat", *path.parent.relative_to(ROOT).parts))
                patterns = SETUPTOOLS["package-data"].get(package, [])
                missing += [] if any(path.match(pattern) for pattern in patterns) else [path]
    assert not missing
