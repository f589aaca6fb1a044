"""Text corpora: selects files and splits off held-out files. Results depend only on paths."""

import hashlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

HELD_OUT_PERCENT = 3
TEST_PERCENT = 25
MAX_FILE_BYTES = 200_000
MAX_LINE_CHARS = 400

_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "lib2to3", "idlelib", "encodings", "pydoc_data"}
    | {"turtledemo", "distutils", "ensurepip", "__phello__"}
)
_EXCLUDED_NAMES = (
    "_sysconfigdata*",
    "bad*",
    "badsyntax*",
    "*_pb2.py",
    "cjkencodings*",
    "pstats*",
    "mp_*preload*",
)
_TEST_FOLDERS = frozenset({"test", "tests", "data"})


class CorpusSplit(NamedTuple):
    """Files of a corpus, sorted by relative path."""

    train: list[Path]
    held_out: list[Path]


def split_files(root: Path, suffixes: tuple[str, ...] = (".py",)) -> CorpusSplit:
    """Splits a corpus into training and held-out files by a hash of the path relative to `root`.

    About 3 % of the non-test files are held out. Of the files under test folders, a quarter is kept, for training only,
    because test files are repetitive and would outweigh other files. Generated tables, very long lines and text that is
    not UTF-8 are left out. The split depends only on relative paths, so that every machine gets the same split.

    Raises:
        FileNotFoundError: `root` is not a folder.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"corpus {root} is not a folder")
    split = CorpusSplit([], [])
    for path in _candidates(root, suffixes):
        relative = path.relative_to(root).as_posix()
        is_test = _is_test(relative)
        bucket = _bucket(relative)
        if is_test and bucket >= TEST_PERCENT:
            continue
        if read_text(path) is None:
            continue
        held_out = not is_test and bucket < HELD_OUT_PERCENT
        (split.held_out if held_out else split.train).append(path)
    return split


def read_text(path: Path) -> str | None:
    """Returns a file's text; None if the file is empty, too large, not UTF-8, or has very long lines."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    if not text.strip() or max(map(len, text.splitlines())) > MAX_LINE_CHARS:
        return None
    return text


def texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yields the texts of files that `split_files` returned."""
    for path in paths:
        text = read_text(path)
        if text is not None:
            yield text


def _candidates(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if not path.name.endswith(suffixes) or not path.is_file() or _EXCLUDED_FOLDERS.intersection(parts):
            continue
        if any(fnmatch(path.name, pattern) for pattern in _EXCLUDED_NAMES):
            continue
        yield path


def _is_test(relative: str) -> bool:
    *folders, name = relative.split("/")
    return bool(_TEST_FOLDERS.intersection(folders)) or name.startswith("test_")


def _bucket(relative: str) -> int:
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:8], "big") % 100
