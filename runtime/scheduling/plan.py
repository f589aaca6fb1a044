"""Work of one round, as the scheduler plans it: the sequences that decode and the prompt chunks to compute."""

from typing import NamedTuple

from wingbeat.runtime.scheduling.request import PromptReport
from wingbeat.runtime.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive positions of one sequence that are computed in one round."""

    seq: Sequence
    start: int
    length: int
    samples: bool = False
    """Whether the chunk reaches the end of the sequence, so that the chunk's last row samples the next token."""
    replay: bool = False
    """Whether the chunk only recomputes hidden states for the drafter, without changing the KV cache or the tokens."""

    @classmethod
    def next_of(cls, seq: Sequence, budget: int) -> "Chunk":
        """Returns a chunk of the next positions of a sequence, at most `budget` positions."""
        length = length_of(seq, seq.num_computed, min(seq.num_uncomputed, budget))
        return cls(seq, seq.num_computed, length, samples=length == seq.num_uncomputed)

    @property
    def is_plain(self) -> bool:
        """Whether all rows of the chunk are text tokens without a report and without prompt log-probabilities."""
        return not (self.seq.request.spans or self.prompt_targets() or self.report)

    @property
    def report(self) -> PromptReport | None:
        """Report for which the chunk's rows supply values; None if the chunk supplies none."""
        report = None if self.replay else self.seq.request.params.report
        return report if report is None or report.is_of_all or self.samples else None

    def prompt_targets(self) -> list[int]:
        """Returns the prompt tokens that follow the chunk's rows, if their log-probabilities are requested."""
        if self.replay or not self.seq.wants_prompt_logprobs:
            return []
        end = min(self.start + self.length + 1, self.seq.num_prompt_tokens)
        return self.seq.token_ids[self.start + 1 : end]


class SchedulerOutput(NamedTuple):
    """Work of one round."""

    decodes: list[Sequence]
    chunks: list[Chunk]
    admitted: list[Sequence]
    """Sequences that got a slot in this round; each sequence is also in `decodes` or `chunks`."""
    budget_left: int
    """Number of prompt tokens that could still be computed in this round."""
    without_room: tuple[Sequence, ...] = ()
    """Decodes whose trees got no blocks, so that only their roots are verified."""

    def with_trees(self) -> list[bool]:
        """Returns, for each decode, whether a tree was requested from the drafter and has blocks."""
        return [seq.draft.tree_requested and seq not in self.without_room for seq in self.decodes]

    def with_texts(self) -> list[bool]:
        """Returns, for each decode, whether its tree was built from earlier text and has blocks."""
        return [seq.draft.text_tree is not None and seq not in self.without_room for seq in self.decodes]

    def with_nodes(self) -> list[bool]:
        """Returns, for each decode, whether its tree may have nodes from the drafter, earlier text or a grammar."""
        return [seq.may_draft and seq not in self.without_room for seq in self.decodes]

    @property
    def num_tokens(self) -> int:
        """Number of positions computed in the round, not counting the drafted nodes of trees."""
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    def request_ids(self) -> list[str]:
        """Returns the request ids of the decodes, then those of the chunks."""
        return [seq.request.request_id for seq in (*self.decodes, *(chunk.seq for chunk in self.chunks))]

    @property
    def asking(self) -> list[int]:
        """Rows of the decodes whose requests want log-probabilities."""
        return [row for row, seq in enumerate(self.decodes) if seq.request.params.logprobs is not None]

    @property
    def is_masked(self) -> bool:
        """Whether the host computes masks of allowed tokens for a sequence of the round."""
        if any(seq.masker is not None for seq in self.decodes):
            return True
        return any(chunk.samples and chunk.seq.masker is not None for chunk in self.chunks)

    @property
    def adds_nodes(self) -> bool:
        """Whether the host may add nodes to the trees: tokens forced by a grammar or copied from earlier text."""
        return self.is_masked or any(seq.draft.text_tree is not None for seq in self.decodes)

    def without_dropped(self) -> "SchedulerOutput":
        """Returns the plan without sequences that have lost their slot since the plan was made."""
        return self._replace(
            decodes=[seq for seq in self.decodes if seq.slot >= 0],
            chunks=[chunk for chunk in self.chunks if chunk.seq.slot >= 0],
            admitted=[seq for seq in self.admitted if seq.slot >= 0],
        )


def length_of(seq: Sequence, start: int, length: int) -> int:
    """Returns the length of a chunk of at most `length` positions that cuts no span that must stay whole.

    Returns 0 if a span that must stay whole begins at `start` and does not fit.
    """
    end = start + length
    cut = next((span.start for span in seq.request.spans if span.whole and span.start < end < span.end), end)
    return max(cut - start, 0)
