"""Finds the demo pair: the small verifier and its EAGLE head that come with Wingbeat."""

from pathlib import Path
from typing import NamedTuple

DEMO_FOLDER = (Path(__file__).parents[1] / "demo_pair").resolve()
"""Data folder of the package `wingbeat.demo_pair`; in a checkout, a link to `examples/demo_pair`."""


class DemoPair(NamedTuple):
    """Checkpoint folders of the demo."""

    verifier: Path
    drafter: Path


def demo_pair(folder: Path = DEMO_FOLDER) -> DemoPair:
    """Returns the demo's checkpoint folders.

    Raises:
        FileNotFoundError: the folders have no config.json.
    """
    pair = DemoPair(folder / "verifier", folder / "drafter")
    for checkpoint in pair:
        if not (checkpoint / "config.json").is_file():
            raise FileNotFoundError(f"the demo pair is not in {folder}: give a model with --model DIR")
    return pair
