"""Folder with the prefixes of a model; files that cannot be used are logged and ignored."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from wingbeat.runtime.prefixes.contents import Contents
from wingbeat.runtime.prefixes.prefix_files import (
    PrefixFileError,
    read_contents,
    read_record,
    write_contents,
    write_record,
)
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix

logger = logging.getLogger(__name__)
RECORD, CONTENTS = ".json", ".safetensors"


class PrefixStore:
    """Reads and writes the files of prefixes.

    Args:
        identity: identity of this engine; contents that an engine with another identity wrote are not read.
        tokenizer: digest of the tokenizer; prefixes of another tokenizer are not read at all.
        has_contents: whether the folder holds computed contents; False stores only definitions of prefixes.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], tokenizer: str, has_contents: bool = True) -> None:
        self.folder = folder
        self.has_contents = has_contents
        self._identity = identity
        self._tokenizer = tokenizer

    def records(self) -> list[SavedPrefix]:
        """Returns the prefixes on disk, sorted by name."""
        found = (self.record(path.stem) for path in sorted(self.folder.glob(f"*{RECORD}")))
        return [prefix for prefix in found if prefix is not None]

    def record(self, name: str) -> SavedPrefix | None:
        """Returns the prefix with this name; None if no usable file has this name."""
        path = self.folder / f"{name}{RECORD}"
        if not path.exists():
            return None
        try:
            return read_record(path, self._tokenizer)
        except PrefixFileError as error:
            logger.warning("A saved prefix is left out: %s", error)
            return None

    def contents(self, prefix: SavedPrefix, mismatch: Callable[[Contents], str | None]) -> Contents | None:
        """Returns the computed contents of a prefix; None if there is no usable file.

        Args:
            mismatch: function that returns the reason why tensors cannot be the contents of this prefix, or None if
                there is no such reason.
        """
        path = self.path(prefix)
        if not (self.has_contents and path.exists()):
            return None
        try:
            contents = read_contents(path, prefix, self._identity)
            if (problem := mismatch(contents)) is not None:
                raise PrefixFileError(f"{path}: {problem}")
            return contents
        except PrefixFileError as error:
            logger.warning("Prefix %s is computed from its tokens: %s", prefix.name, error)
            return None

    def write(self, prefix: SavedPrefix, contents: Contents | None) -> Path | None:
        """Writes a prefix and returns its file; returns None, and logs the error, if writing fails.

        Args:
            contents: contents to write; None if the contents are on disk already.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_record(self.folder / f"{prefix.name}{RECORD}", prefix, self._tokenizer)
            if contents is not None:
                write_contents(self.path(prefix), prefix, self._identity, contents)
            return self.path(prefix) if self.has_contents else self.folder / f"{prefix.name}{RECORD}"
        except OSError as error:
            logger.warning("Prefix %s cannot be kept in %s: %s", prefix.name, self.folder, error)
            return None

    def delete(self, name: str, version: int) -> None:
        """Deletes a prefix, unless a later version has its name."""
        kept = self.record(name)
        if kept is not None and kept.version > version:
            return
        for ending in (RECORD, CONTENTS):
            try:
                (self.folder / f"{name}{ending}").unlink(missing_ok=True)
            except OSError as error:
                logger.warning("Prefix %s cannot be deleted from %s: %s", name, self.folder, error)

    def path(self, prefix: SavedPrefix) -> Path:
        """Returns the path of the file with the contents of a prefix."""
        return self.folder / f"{prefix.name}{CONTENTS}"
