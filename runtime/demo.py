"""Where the demo pair lies: the small verifier and its EAGLE head that come with Wingbeat."""

from pathlib import Path
from typing import NamedTuple

_PARENT = Path(__file__).resolve().parent.parent
_IN_SOURCE_TREE, _INSTALLED = _PARENT / "examples" / "demo_pair", _PARENT / "demo_pair"
DEMO_FOLDER = _IN_SOURCE_TREE if _IN_SOURCE_TREE.is_dir() else _INSTALLED
"""In an installed wheel it is the data of a package of its own, `wingbeat.demo_pair`."""


class DemoPair(NamedTuple):
    """Checkpoint folders of the demo."""

    verifier: Path
    drafter: Path


def demo_pair(folder: Path = DEMO_FOLDER) -> DemoPair:
    """The demo's checkpoint folders.

    Raises:
        FileNotFoundError: the weights are not there.
    """
    pair = DemoPair(folder / "verifier", folder / "drafter")
    for checkpoint in pair:
        if not (checkpoint / "config.json").is_file():
            raise FileNotFoundError(f"the demo pair is not at {folder}: name a model with --model DIR")
    return pair
