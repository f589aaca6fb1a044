"""The wheel holds what the tree holds, which setuptools finds through the links in `src/wingbeat`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.versions.environments import build_wheel

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "runtime", "cluster", "deployments")
DATA = [name for name in ("demo_pair", "smollm2_eagle3") if (ROOT / "examples" / name).is_dir()]
"""Packages of data alone, which are folders of `examples`."""
LINKS = {folder: f"../../{folder}" for folder in FOLDERS} | {name: f"../../examples/{name}" for name in DATA}
"""Entries of `src/wingbeat` beside `__init__.py`: relative links, so that a checkout can be moved and packed."""
MOST_BYTES = 48 * 10**6
"""The demo pair, and a head of SmolLM2."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built of a copy, by what is installed."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_package_is_a_file_and_links_to_the_folders():
    held = {path.name: path for path in (ROOT / "src" / "wingbeat").iterdir() if path.name != "__pycache__"}
    assert not held.pop("__init__.py").is_symlink()
    assert {name: str(path.readlink()) for name, path in held.items()} == LINKS
    assert all(path.is_dir() for path in held.values())


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
        "held = files('wingbeat.demo_pair')\n"
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


def test_a_wheel_holds_every_file_of_the_packages_and_of_the_data_and_nothing_else(wheel: Path):
    """Files that a module opens beside itself, such as a page, are missing from a wheel unless they are named."""
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    expected = {f"wingbeat/{path.relative_to(ROOT)}" for path in files if path.suffix != ".pyc"}
    data = ROOT / "examples"
    for name in DATA:
        found = [path for inner in ("verifier", "drafter", "head") for path in (data / name / inner).glob("*")]
        # setuptools takes modules beside the data along.
        found += [data / name / "README.md", *(data / name).glob("*.py")]
        expected |= {f"wingbeat/{path.relative_to(data)}" for path in found}
    assert held == expected | {"wingbeat/__init__.py"}
