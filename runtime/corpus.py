"""Text corpora for training: selects files, splits off held-out files, and cuts token windows.

This file handles files and token ids, not models. Results depend only on paths, file contents, seeds and step numbers,
so that a resumed run gets the batches that an uninterrupted run would have got.
"""

import hashlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

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


def encode_documents(tokenizer: PreTrainedTokenizerBase, paths: Iterable[Path]) -> list[Tensor]:
    """Returns one int64 tensor [length] per file: the separator (eos), then the text.

    Raises:
        ValueError: the tokenizer has no eos token.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError("the tokenizer has no eos token to separate documents with")
    encoded = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts(paths))
    return [torch.tensor([eos, *ids], dtype=torch.int64) for ids in encoded]


class WindowSampler:
    """Batches of fixed-length windows from a shuffled stream of documents, addressed by step.

    Each epoch shuffles the documents, joins them into one stream, rotates the stream by a random offset, cuts it and
    shuffles the windows. `batch` is a pure function of (documents, seed, cursor), so no state has to be saved to
    resume.
    """

    def __init__(self, documents: list[Tensor], seed: int) -> None:
        if not documents:
            raise ValueError("the corpus has no documents")
        self.num_tokens = sum(len(document) for document in documents)
        self._documents = documents
        self._seed = seed
        self._epoch: tuple[int, int, Tensor] | None = None

    def batch(self, cursor: int, batch_size: int, length: int) -> Tensor:
        """Returns windows `cursor * batch_size` and following, of `length` tokens -> int64 [batch_size, length].

        Raises:
            ValueError: the corpus is shorter than one window.
        """
        return self.rows(cursor * batch_size, range(batch_size), length)

    def rows(self, start: int, rows: range, length: int) -> Tensor:
        """Returns window `start + row` for each row -> int64 [len(rows), length].

        Raises:
            ValueError: the corpus is shorter than one window.
        """
        per_epoch = self.num_tokens // length
        if per_epoch == 0:
            raise ValueError(f"the corpus has {self.num_tokens} tokens, fewer than one window of {length}")
        numbers = [divmod(start + row, per_epoch) for row in rows]
        if not numbers:
            return torch.empty(0, length, dtype=torch.int64)
        return torch.stack([self._window(epoch, index, length) for epoch, index in numbers])

    def token_counts(self, vocab_size: int) -> Tensor:
        """Counts the occurrences of each token -> int64 [vocab_size]."""
        return torch.bincount(torch.cat(self._documents), minlength=vocab_size)

    def _window(self, epoch: int, index: int, length: int) -> Tensor:
        if self._epoch is None or self._epoch[:2] != (epoch, length):
            self._epoch = (epoch, length, self._epoch_windows(epoch, length))
        return self._epoch[2][index]

    def _epoch_windows(self, epoch: int, length: int) -> Tensor:
        rng = np.random.default_rng((self._seed, epoch, length))
        stream = torch.cat([self._documents[i] for i in rng.permutation(len(self._documents))])
        stream = stream.roll(int(rng.integers(len(stream))))
        count = len(stream) // length
        windows = stream[: count * length].view(count, length)
        return windows[torch.from_numpy(rng.permutation(count))]


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
