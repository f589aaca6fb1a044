"""Files with users' texts: readable by their owner alone, and with checksums."""

import hashlib
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, accessible to their owner alone."""
    for path in reversed([folder, *folder.parents]):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def make_private(folder: Path) -> None:
    """Restricts a folder and everything in it to its owner; ignores files that disappear meanwhile."""
    for path in (folder, *folder.rglob("*")):
        try:
            path.chmod(0o700 if path.is_dir() else 0o600)
        except FileNotFoundError:
            continue


def digest_of(folder: Path, pattern: str = "*") -> str:
    """SHA-256 over names and bytes of the files in a folder, as hex digits.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(filter(Path.is_file, folder.glob(pattern))):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
