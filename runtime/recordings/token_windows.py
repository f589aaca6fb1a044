"""Token ids of a corpus, cut into windows.

Results depend only on paths, seeds and step numbers, so that a resumed run gets the same batches as an uninterrupted
run.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from wingbeat.runtime.corpus import texts


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
    """Batches of fixed-length windows from a shuffled stream of documents, selected by step number.

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
