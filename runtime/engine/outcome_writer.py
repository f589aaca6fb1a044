"""Fills what a drafter is sent in one round: the only writer of an `Outcome`, beside its tables by slot."""

from torch import Tensor

from wingbeat.runtime.protocol.messages import AcceptedPaths, Outcome, RoundHeader
from wingbeat.runtime.protocol.transfer import copy_all, copy_into, upload


class OutcomeWriter:
    """One round: chunks in any number, decodes once if there are any, then `finish`.

    Args:
        outcome: acquired, and not published.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.num_chunk_tokens = 0
        """Of the chunks so far."""
        self._num_decodes = 0
        self._chunk_slots: list[int] = []
        self._chunk_positions: list[int] = []
        self._chunk_lens: list[int] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    @property
    def capacity(self) -> int:
        """Tokens of chunks that fit."""
        return self.outcome.chunk_taps.shape[0]

    def has_room(self, num_tokens: int) -> bool:
        """Whether a chunk of so many tokens fits."""
        return self.num_chunk_tokens + num_tokens <= self.capacity

    def add_chunk(self, slot: int, position: int, length: int) -> tuple[Tensor, Tensor]:
        """Another chunk, to be filled in: its taps [length, taps_size] and next tokens int64 [length]."""
        rows = slice(self.num_chunk_tokens, self.num_chunk_tokens + length)
        self.num_chunk_tokens = rows.stop
        self._chunk_slots.append(slot)
        self._chunk_positions.append(position)
        self._chunk_lens.append(length)
        return self.outcome.chunk_taps[rows], self.outcome.chunk_next_token_ids[rows]

    def decodes(self, slots: list[int], paths: AcceptedPaths) -> None:
        """What was accepted for the sequences in `slots`, by row of the paths."""
        count, outcome = len(slots), self.outcome
        self._num_decodes = count
        if outcome.decode_slots.device == paths.slots.device:
            self.copy([(outcome.decode_slots[:count], paths.slots)])
        else:  # copied from the device, they would be waited for
            write_numbers(outcome.decode_slots, slots)
        self.copy(
            [
                (outcome.decode_positions[:count], paths.positions),
                (outcome.decode_num_tokens[:count], paths.num_tokens),
                (outcome.decode_token_ids[:count], paths.token_ids),
            ]
        )
        if paths.taps is not None:
            self.copy([(outcome.decode_taps[:count, : paths.taps.shape[1]], paths.taps)])

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """More of (target, source), made with all others by `finish`: neither may change until then."""
        self._copies += copies

    def finish(
        self, proposal_slots: list[int], max_levels: int, max_len: int = 0, has_rule: int = 0, has_masks: int = 0
    ) -> None:
        """Ask for trees, and write the header; what it says is `RoundHeader`'s."""
        outcome = self.outcome
        copy_all(self._copies)
        write_numbers(outcome.chunk_slots, self._chunk_slots)
        write_numbers(outcome.chunk_positions, self._chunk_positions)
        write_numbers(outcome.chunk_lens, self._chunk_lens)
        write_numbers(outcome.proposal_slots, proposal_slots)
        counts = self._num_decodes, len(self._chunk_slots), len(proposal_slots)
        RoundHeader(0, *counts, max_levels, max_len, has_rule, has_masks).write(outcome.header)


def write_numbers(target: Tensor, values: list[int]) -> None:
    """Host numbers into the first rows of a channel's tensor."""
    if values:
        copy_into(target[: len(values)], upload(values, target.device))
