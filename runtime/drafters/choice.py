"""What the word a user gives for a drafter means: the one place that decides it. Loads no model and no torch."""

import re
from pathlib import Path
from typing import NamedTuple

from wingbeat.runtime.demo import DEMO_FOLDER
from wingbeat.runtime.folder_kinds import folder_problem
from wingbeat.runtime.heads.mtp_names import count_modules
from wingbeat.runtime.hub import HubName, checkpoint_folder
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.tensor_files import read_fields, tensor_files

TEXT_DRAFTERS = ("ngram", *(name for drafters in hooks("text_drafters") for name in drafters()))
"""Names of drafters that continue earlier text."""
NAMES = ("auto", "none", *TEXT_DRAFTERS, "mtp")
ALLOWED = (
    f"{', '.join(map(repr, NAMES))}, the folder of an EAGLE head, of a one-pass head or of a draft model, "
    "its name on the Hugging Face hub as 'org/name[@revision]', or your own class as 'module.path.ClassName'"
)
CHECKPOINT, USER = "checkpoint", "user"
"""Kinds that are not called by a name: a folder, whose content tells heads from a draft model, and a class."""
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


class DrafterChoice(NamedTuple):
    """A drafter as it was asked for, `auto` resolved."""

    kind: str
    """A name of NAMES but `auto`, or CHECKPOINT or USER."""
    source: str | Path
    """What `wingbeat.runtime.drafters.registry.load_drafter` takes."""
    label: str
    """One word for people to read."""
    automatic: bool = False
    """Whether nobody has named it, so that another drafter takes its place where it cannot be loaded."""

    @property
    def asked(self) -> str | Path:
        """As `parse_drafter` takes it, beside the model's folder."""
        return "auto" if self.automatic else self.source

    @property
    def drafts(self) -> bool:
        """False where everything is decoded plainly."""
        return self.kind != "none"

    @property
    def has_weights(self) -> bool:
        """Whether it runs a model, whose weights may be another verifier's."""
        return self.kind in (CHECKPOINT, "mtp")

    @property
    def can_use_gpu(self) -> bool:
        """Whether a GPU is of use: what looks tokens up stays on the CPU whatever share of a GPU it has."""
        return self.has_weights or self.kind == USER

    @property
    def needs_gpu(self) -> bool:
        """Whether it has to have a GPU beside a verifier that has one."""
        return self.has_weights


def parse_drafter(drafter: str | Path, model: Path | None) -> DrafterChoice:
    """Tell which drafter is meant.

    Args:
        drafter: one of NAMES, a folder, a name of the hub, or the import path of a class. `auto` is the demo pair's
            head where no model is given, the model's own multi-token prediction where its checkpoint has it, and
            prompt lookup for all others.
        model: the verifier's folder or its name on the hub; None is the demo pair's.

    Raises:
        ValueError: it is nothing of the kind; says what is allowed.
        HubError: it is of the hub, and not to be had.
    """
    text = str(drafter)
    if text == "auto":
        if model is None:
            return DrafterChoice(CHECKPOINT, DEMO_FOLDER / "drafter", "demo")
        if holds_mtp(checkpoint_folder(model)):
            return DrafterChoice("mtp", "mtp", "mtp", automatic=True)
        text = "ngram"
    if text in NAMES:
        return DrafterChoice(text, text, text)
    # As a path, ./org/name is org/name, which may be of the hub.
    name = None if text.startswith((".", "~")) else HubName.parse(text)
    folder = checkpoint_folder(text) if name is not None else Path(text)
    if name is not None:
        return DrafterChoice(CHECKPOINT, folder, name.name)
    if folder.exists():
        if (problem := folder_problem(folder)) is not None:
            raise ValueError(f"drafter is {text!r}: {problem}; it must be {ALLOWED}")
        return DrafterChoice(CHECKPOINT, folder, folder.resolve().name)
    if _IMPORT_PATH.fullmatch(text):
        return DrafterChoice(USER, text, text.rpartition(".")[2])
    missing = f"there is no folder {text}; it " if "/" in text else ""
    raise ValueError(f"drafter is {text!r}: {missing}must be {ALLOWED}")


def holds_mtp(model: Path) -> bool:
    """Whether a verifier's checkpoint has multi-token-prediction layers that can be read.

    Raises:
        ValueError: its config.json or a weight file cannot be read.
    """
    config = read_fields(model / "config.json")
    text = config.get("text_config")
    num_layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    return count_modules(tensor_files(model), num_layers if isinstance(num_layers, int) else 0) > 0
