"""Where the demo pair lies: the small verifier and its EAGLE head that come with Wingbeat."""

from pathlib import Path
from typing import NamedTuple

DEMO_FOLDER = (Path(__file__).parents[1] / "demo_pair").resolve()
"""The data of a package of its own, `wingbeat.demo_pair`; in a checkout that is a link to `examples/demo_pair`."""


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
