"""Drafters of the optional features, for tests of every kind: each feature's folder has a module `kinds`."""

from importlib import import_module
from pathlib import Path
from typing import Any


def of_features(table: str) -> dict[str, Any]:
    """A table of the features' modules, by kind.

    Args:
        table: "KINDS", loaded as a user names it: folder -> `loaded_kind.Kind`; "FOLDERS": folder -> (the verifier's,
            what names the drafter); "CAPTURED": new_folder -> (speculation, graph device) -> drafter; "ON_FAKE_GPU":
            (speculation, graph device, layers) -> drafter; "CONFIGS": fields -> config of an EAGLE-3 head;
            "PREPARED_FOR_GPU": step (verifier) -> None, before the verifier is placed on the fake GPU.
    """
    modules = (import_module(f"tests.runtime.{path.parent.name}.kinds") for path in _MODULES)
    return {name: made for module in modules for name, made in getattr(module, table, {}).items()}


_MODULES = sorted(Path(__file__).parent.glob("*/kinds.py"))
