"""Resolves the user's `drafter` setting to a `DrafterChoice`; loads no model and does not import torch."""

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
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.tensor_files import read_fields, tensor_files

EAGLE = DrafterKind(
    "eagle",
    "wingbeat.runtime.drafters.eagle:build_eagle",
    folder="an EAGLE head",
    claims="wingbeat.runtime.heads.layouts:holds_head",
    readings="wingbeat.runtime.heads.load:head_conventions",
)
KINDS = {kind.name: kind for kind in (EAGLE, *chain(*hooks("drafter_kinds")))}
"""Kinds of drafters by name."""
_FOLDERS = " or of ".join(", of ".join(kind.folder for kind in KINDS.values() if kind.folder).rsplit(", of ", 1))
_CLASS = next((kind for kind in KINDS.values() if kind.find_problem is not None), None)
TEXT_DRAFTERS = tuple(kind.name for kind in KINDS.values() if kind.copies_text)
"""Names of the drafters that copy earlier text."""
NAMES = ("auto", "none", *(kind.name for kind in KINDS.values() if kind.folder is None and kind is not _CLASS))
_HUB = "its name on the Hugging Face hub as 'org/name[@revision]'"
_OTHERS = f"or {_HUB}" if _CLASS is None else f"{_HUB}, or your own class as 'module.path.ClassName'"
ALLOWED = f"{', '.join(map(repr, NAMES))}, the folder of {_FOLDERS}, {_OTHERS}"
CHECKPOINT = "checkpoint"
"""Kind of drafter of a choice that names a folder. The folder's files decide later whether the drafter is a head or a
draft model."""
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


KIND_OF_SETTING = {setting.name: kind.name for kind in KINDS.values() for setting in kind.settings}
"""Maps the name of a setting to the name of the only kind of drafter that has this setting."""


def check_settings(choice: "DrafterChoice", given: Mapping[str, Any]) -> None:
    """Raises ValueError (one line) if a setting belongs to another kind of drafter or contradicts another setting."""
    for name, value in given.items():
        if (of := KIND_OF_SETTING[name]) != choice.kind:
            raise ValueError(
                f"{name} is {value} and drafter is {choice.label}: only drafter {of} has this setting; leave one out"
            )
    kind = KINDS.get(choice.kind)
    if given and kind is not None and kind.check_settings is not None:
        load_function(kind.check_settings)(given)


class DrafterChoice(NamedTuple):
    """The drafter that the user chose, with `auto` resolved."""

    kind: str
    """CHECKPOINT, "none", or a key of KINDS."""
    source: str | Path
    """Argument `source` of `wingbeat.runtime.drafters.registry.load_drafter`."""
    label: str
    """Short name for display."""
    automatic: bool = False
    """Whether `auto` chose the drafter. If such a drafter cannot be loaded, another drafter is used instead."""

    @property
    def asked(self) -> str | Path:
        """Drafter setting from which `parse_drafter`, given the model's folder too, makes this choice again."""
        return "auto" if self.automatic else self.source

    @property
    def drafts(self) -> bool:
        """False if the drafter is "none": plain decoding."""
        return self.kind != "none"

    @property
    def has_weights(self) -> bool:
        """Whether the drafter has model weights, which may have been trained for another verifier."""
        return self.kind == CHECKPOINT or (self.drafts and KINDS[self.kind].modules is not None)

    @property
    def drafts_from_other_requests(self) -> bool:
        """Whether drafts may come from the texts of other requests."""
        return self.kind in KINDS and KINDS[self.kind].drafts_from_other_requests

    @property
    def can_use_gpu(self) -> bool:
        """Whether this drafter can run on a GPU; drafters that look up tokens always run on the CPU."""
        return self.has_weights or self.is_class

    @property
    def is_class(self) -> bool:
        """Whether the drafter is a user's class.

        Such a class needs to be importable only on the machine that drafts.
        """
        return _CLASS is not None and self.kind == _CLASS.name


_FALLBACK = next((kind.name for kind in KINDS.values() if kind.is_fallback), "none")
FALLBACK = DrafterChoice(_FALLBACK, _FALLBACK, _FALLBACK)
"""The drafter of models for which `auto` finds nothing better."""


def parse_drafter(drafter: str | Path, model: Path | None) -> DrafterChoice:
    """Resolve a drafter setting.

    Args:
        drafter: one of NAMES, a folder, a GGUF file, a repository name on the Hugging Face hub, or the import path of a
            class. `auto` means: without a model, the demo pair's head; for a named model, the head that comes with
            Wingbeat; for a checkpoint with draft modules of its own, the kind that drafts with them; otherwise,
            FALLBACK.
        model: the verifier's folder or name, as accepted by `checkpoint_folder`; None means the demo pair's verifier.

    Raises:
        ValueError: the setting matches none of these; the message lists the allowed settings.
        HubError: the repository cannot be downloaded.
    """
    text = str(drafter)
    if text == "auto":
        if model is None:
            return DrafterChoice(CHECKPOINT, DEMO_FOLDER / "drafter", "demo")
        folder = checkpoint_folder(model)
        if (head := first_result("own_head", model)) is not None:
            return DrafterChoice(CHECKPOINT, head, head.parent.name)
        own = next((kind.name for kind in KINDS.values() if holds_modules(kind, folder)), None)
        return FALLBACK if own is None else DrafterChoice(own, own, own, automatic=True)
    if text in NAMES:
        return DrafterChoice(text, text, text)
    # The setting's text decides, because Path("./org/name") equals Path("org/name"), which could be a hub name.
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
    """Whether a verifier's checkpoint contains readable draft modules of this kind.

    Raises:
        ValueError: the checkpoint's config.json or a weight file cannot be read.
    """
    if kind.modules is None:
        return False
    config = read_fields(model / "config.json")
    text = config.get("text_config")
    num_layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    names = tensor_files(model)
    return bool(load_function(kind.modules)(names, num_layers if isinstance(num_layers, int) else 0))
