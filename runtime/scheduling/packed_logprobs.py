"""Log-probabilities of many tokens as one array, which needs a tenth of the memory that an object per token would."""

from collections.abc import Iterator, Sequence

import numpy as np

from wingbeat.runtime.scheduling.request import TokenLogprob


class PackedLogprobs(Sequence[TokenLogprob]):
    """Sequence of `TokenLogprob`, one per row, created on access.

    Args:
        rows: int64 [num_tokens, 1 + 2 * num_top]: log-probability of the token, ids of the most likely tokens,
            log-probabilities of the most likely tokens. Log-probabilities are stored as the bits of float64.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    @classmethod
    def of_round(cls, packed: np.ndarray, num_top: int) -> "PackedLogprobs":
        """Copies rows packed by `wingbeat.runtime.round.choice.token_logprobs`.

        Args:
            packed: int64 [num_tokens, 1 + 2 * most].
            num_top: number of most likely tokens to keep in each row, at most `most`.
        """
        most = packed.shape[1] // 2
        return cls(np.concatenate([packed[:, : 1 + num_top], packed[:, 1 + most : 1 + most + num_top]], axis=1))

    @classmethod
    def joined(cls, parts: Sequence["PackedLogprobs"]) -> "PackedLogprobs":
        """Concatenates parts, of which there must be at least one."""
        return cls(np.concatenate([part._rows for part in parts]))

    @classmethod
    def of_bytes(cls, width: int, content: bytes) -> "PackedLogprobs":
        """Restores log-probabilities from the result of `as_bytes`."""
        return cls(np.frombuffer(content, np.int64).reshape(-1, width))

    def as_bytes(self) -> tuple[int, bytes]:
        """Returns the row width and the bytes of all rows, for sending between processes."""
        return self._rows.shape[1], self._rows.tobytes()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int | slice) -> "TokenLogprob | PackedLogprobs":
        if isinstance(place, slice):
            return PackedLogprobs(self._rows[place])
        (found,) = PackedLogprobs(self._rows[place][None])
        return found

    def __iter__(self) -> Iterator[TokenLogprob]:
        num_top = self._rows.shape[1] // 2
        numbers = np.ascontiguousarray(self._rows).view(np.float64)
        ids = self._rows[:, 1 : 1 + num_top].tolist()
        for logprob, row_ids, row in zip(numbers[:, 0].tolist(), ids, numbers[:, 1 + num_top :].tolist(), strict=True):
            yield TokenLogprob(logprob, tuple(zip(row_ids, row, strict=True)))
