"""What the word a user gives for a drafter means: the one place that decides it. Loads no model and no torch."""

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from wingbeat.kernels.parts import load_function
from wingbeat.runtime.demo import DEMO_FOLDER
from wingbeat.runtime.drafters.drafter_kind import DrafterKind
from wingbeat.runtime.folder_kinds import folder_problem
from wingbeat.runtime.hub import HubName, checkpoint_folder
from wingbeat.runtime.parts import first, hooks
from wingbeat.runtime.tensor_files import read_fields, tensor_files

EAGLE = DrafterKind(
    "eagle",
    "wingbeat.runtime.drafters.eagle:build_eagle",
    folder="an EAGLE head",
    claims="wingbeat.runtime.heads.layouts:holds_head",
    readings="wingbeat.runtime.heads.load:head_conventions",
    matches="wingbeat.runtime.heads.unroll:matches",
)
KINDS = {kind.name: kind for kind in (EAGLE, *chain(*hooks("drafter_kinds")))}
"""Kinds of drafters, by name."""
_FOLDERS = " or of ".join(", of ".join(kind.folder for kind in KINDS.values() if kind.folder).rsplit(", of ", 1))
_CLASS = next((kind for kind in KINDS.values() if kind.find_problem is not None), None)
TEXT_DRAFTERS = tuple(kind.name for kind in KINDS.values() if kind.copies_text)
"""Names of drafters that continue earlier text."""
NAMES = ("auto", "none", *(kind.name for kind in KINDS.values() if kind.folder is None and kind is not _CLASS))
_HUB = "its name on the Hugging Face hub as 'org/name[@revision]'"
_OTHERS = f"or {_HUB}" if _CLASS is None else f"{_HUB}, or your own class as 'module.path.ClassName'"
ALLOWED = f"{', '.join(map(repr, NAMES))}, the folder of {_FOLDERS}, {_OTHERS}"
CHECKPOINT = "checkpoint"
"""The kind of a folder, whose content tells heads from a draft model."""
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


KIND_OF_SETTING = {setting.name: kind.name for kind in KINDS.values() for setting in kind.settings}
"""By the name of a setting, the one kind of drafter that has it."""


def check_settings(choice: "DrafterChoice", given: Mapping[str, Any]) -> None:
    """Raises ValueError, one line, where settings are of another kind of drafter, or contradict one another."""
    for name, value in given.items():
        if (of := KIND_OF_SETTING[name]) != choice.kind:
            raise ValueError(f"{name} is {value} and drafter is {choice.label}: only {of} has that; leave one out")
    kind = KINDS.get(choice.kind)
    if given and kind is not None and kind.check_settings is not None:
        load_function(kind.check_settings)(given)


class DrafterChoice(NamedTuple):
    """A drafter as it was asked for, `auto` resolved."""

    kind: str
    """CHECKPOINT, "none", or a name of KINDS."""
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
        return self.kind == CHECKPOINT or (self.drafts and KINDS[self.kind].modules is not None)

    @property
    def remembers(self) -> bool:
        """Whether its drafts may come from other requests' texts."""
        return self.kind in KINDS and KINDS[self.kind].remembers

    @property
    def can_use_gpu(self) -> bool:
        """Whether a GPU is of use: what looks tokens up stays on the CPU whatever share of a GPU it has."""
        return self.has_weights or self.is_class

    @property
    def is_class(self) -> bool:
        """Whether it is a user's class, which only the machine that drafts need have."""
        return _CLASS is not None and self.kind == _CLASS.name


_FALLBACK = next((kind.name for kind in KINDS.values() if kind.is_fallback), "none")
FALLBACK = DrafterChoice(_FALLBACK, _FALLBACK, _FALLBACK)
"""The drafter of a model for which nothing better is known."""


def parse_drafter(drafter: str | Path, model: Path | None) -> DrafterChoice:
    """Tell which drafter is meant.

    Args:
        drafter: one of NAMES, a folder, a GGUF file, a name of the hub, or the import path of a class. `auto` is the
            demo pair's head where no model is given, the head that comes with Wingbeat for a named model, a kind that
            drafts by modules of the model's own checkpoint where it has them, and FALLBACK for all others.
        model: the verifier's folder or its name, as `checkpoint_folder` takes it; None is the demo pair's.

    Raises:
        ValueError: it is nothing of the kind; says what is allowed.
        HubError: it is of the hub, and not to be had.
    """
    text = str(drafter)
    if text == "auto":
        if model is None:
            return DrafterChoice(CHECKPOINT, DEMO_FOLDER / "drafter", "demo")
        folder = checkpoint_folder(model)
        if (head := first("own_head", model)) is not None:
            return DrafterChoice(CHECKPOINT, head, head.parent.name)
        own = next((kind.name for kind in KINDS.values() if holds_modules(kind, folder)), None)
        return FALLBACK if own is None else DrafterChoice(own, own, own, automatic=True)
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
    if _CLASS is not None and _IMPORT_PATH.fullmatch(text):
        return DrafterChoice(_CLASS.name, text, text.rpartition(".")[2])
    missing = f"there is no folder {text}; it " if "/" in text else ""
    raise ValueError(f"drafter is {text!r}: {missing}must be {ALLOWED}")


def holds_modules(kind: DrafterKind, model: Path) -> bool:
    """Whether a verifier's checkpoint has modules of this kind that can be read.

    Raises:
        ValueError: its config.json or a weight file cannot be read.
    """
    if kind.modules is None:
        return False
    config = read_fields(model / "config.json")
    text = config.get("text_config")
    num_layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    names = tensor_files(model)
    return bool(load_function(kind.modules)(names, num_layers if isinstance(num_layers, int) else 0))
