"""One round's work as the scheduler decides it: which sequences decode, and which pieces of prompts are computed."""

from typing import NamedTuple

from wingbeat.runtime.scheduling.request import PromptReport
from wingbeat.runtime.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive positions of one sequence computed in one round."""

    seq: Sequence
    start: int
    length: int
    samples: bool = False
    """Whether it reaches the end of the sequence, so that its last row yields a token."""
    replay: bool = False
    """True recomputes hidden states for the drafter only: KV and tokens stay as they are."""

    @classmethod
    def next_of(cls, seq: Sequence, budget: int) -> "Chunk":
        """The next positions of a sequence, at most `budget` of them."""
        length = length_of(seq, seq.num_computed, min(seq.num_uncomputed, budget))
        return cls(seq, seq.num_computed, length, samples=length == seq.num_uncomputed)

    @property
    def is_plain(self) -> bool:
        """Whether its rows are tokens alone, no spans, of which none is reported on."""
        return not (self.seq.request.spans or self.prompt_targets() or self.report)

    @property
    def report(self) -> PromptReport | None:
        """Report on its rows, beside log-probabilities; None where there is none."""
        report = None if self.replay else self.seq.request.params.report
        return report if report is None or report.is_of_all or self.samples else None

    def prompt_targets(self) -> list[int]:
        """Prompt tokens that its first rows predict and whose log-probabilities are asked for."""
        if self.replay or not self.seq.wants_prompt_logprobs:
            return []
        end = min(self.start + self.length + 1, self.seq.num_prompt_tokens)
        return self.seq.token_ids[self.start + 1 : end]


class SchedulerOutput(NamedTuple):
    """One round's work."""

    decodes: list[Sequence]
    chunks: list[Chunk]
    admitted: list[Sequence]
    """Sequences that got a slot this round; each is in `decodes` or `chunks` too."""
    budget_left: int
    """Prompt tokens that could still be computed this round."""
    without_room: tuple[Sequence, ...] = ()
    """Decodes for whose trees there are no blocks."""

    def with_trees(self) -> list[bool]:
        """By decode: whether a tree was asked for and there are blocks for it."""
        return [seq.draft.tree_requested and seq not in self.without_room for seq in self.decodes]

    def with_texts(self) -> list[bool]:
        """By decode: whether its tree is made of earlier text, and there are blocks for it."""
        return [seq.draft.text_tree is not None and seq not in self.without_room for seq in self.decodes]

    def with_nodes(self) -> list[bool]:
        """By decode: whether anything may be drafted for it, by the drafter, from earlier text or by its grammar."""
        return [seq.may_draft and seq not in self.without_room for seq in self.decodes]

    @property
    def num_tokens(self) -> int:
        """Positions that are computed, beside those of trees."""
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    def request_ids(self) -> list[str]:
        """Whose work it is."""
        return [seq.request.request_id for seq in (*self.decodes, *(chunk.seq for chunk in self.chunks))]

    @property
    def asking(self) -> list[int]:
        """Decodes whose log-probabilities are asked for."""
        return [row for row, seq in enumerate(self.decodes) if seq.request.params.logprobs is not None]

    @property
    def is_masked(self) -> bool:
        """Whether the host says which tokens may be chosen for a sequence of the round."""
        if any(seq.masker is not None for seq in self.decodes):
            return True
        return any(chunk.samples and chunk.seq.masker is not None for chunk in self.chunks)

    @property
    def adds_nodes(self) -> bool:
        """Whether the host may add nodes to the trees: what is certain, and what continues earlier text."""
        return self.is_masked or any(seq.draft.text_tree is not None for seq in self.decodes)

    @property
    def is_seated(self) -> bool:
        """Whether a sequence has a seat (`scheduler.Seats`)."""
        return any(seq.seat for seq in (*self.decodes, *(chunk.seq for chunk in self.chunks)))

    def without_dropped(self) -> "SchedulerOutput":
        """The same without sequences that have lost their slot since."""
        return self._replace(
            decodes=[seq for seq in self.decodes if seq.slot >= 0],
            chunks=[chunk for chunk in self.chunks if chunk.seq.slot >= 0],
            admitted=[seq for seq in self.admitted if seq.slot >= 0],
        )


def length_of(seq: Sequence, start: int, length: int) -> int:
    """Length of a chunk of at most `length` positions; 0 where not even the first span that is whole fits."""
    end = start + length
    cut = next((span.start for span in seq.request.spans if span.whole and span.start < end < span.end), end)
    return max(cut - start, 0)
