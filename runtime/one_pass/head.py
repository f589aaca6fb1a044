"""A head that drafts a block in one pass: the backbone, and the family's walk over the slots."""

from torch import Tensor

from wingbeat.runtime.one_pass.backbone import Backbone
from wingbeat.runtime.one_pass.config import OnePassConfig
from wingbeat.runtime.one_pass.walks import (
    CandidateSelector,
    ChooseCandidates,
    LatticeWalk,
    MarginalWalk,
    MarkovHead,
    MarkovWalk,
    Walk,
)


class OnePassHead(Backbone):
    """A DFlash, JetSpec, DSpark or DFlash2 head, depending on its config."""

    def __init__(self, config: OnePassConfig) -> None:
        super().__init__(config)
        hidden, vocab_size = config.hidden_size, config.vocab_size
        self.markov = None
        if config.markov is not None:
            self.markov = MarkovHead(config.markov, hidden, vocab_size, config.draft_vocab_size)
        self.selector = None if config.lattice is None else CandidateSelector(config.lattice, hidden, vocab_size)

    def walk(self, hidden: Tensor, choose: ChooseCandidates | None = None) -> Walk:
        """The walk over a block's slots, from the slots' hidden states [num_reqs, num_drafted, H] of `run_block`.

        Args:
            hidden: hidden states of the slots.
            choose: see `LatticeWalk`; unused by heads without candidates.
        """
        return self.walk_over(self.logits(hidden), hidden, choose)

    def walk_over(self, logits: Tensor, hidden: Tensor, choose: ChooseCandidates | None = None) -> Walk:
        """Returns the same as `walk`, from logits [num_reqs, num_drafted, draft_vocab_size] that are already
        computed.
        """
        if self.selector is not None:
            return LatticeWalk(self.selector, self, logits, hidden, choose)
        return MarginalWalk(logits) if self.markov is None else MarkovWalk(self.markov, logits, hidden)
