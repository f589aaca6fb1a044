"""Trees on the host: as they came, or checked, and what is verified of them once that is chosen."""

from torch import Tensor

from wingbeat.kernels.cpu.drafted import DraftIntake, NodeChoice, Sent, TakenTrees
from wingbeat.runtime.cpu.round.packed_rows import PackedDecodes, VerifiedTrees
from wingbeat.runtime.protocol.messages import TokenTree, TreeReply
from wingbeat.runtime.round.slots import DecodeRows


class HostTrees:
    """Trees of one round's decodes. One call of C++ checks them, chooses what is verified and lays that out.

    Args:
        wanted: bool [num_decodes]: a tree was asked for; None where the trees are checked.
    """

    def __init__(self, intake: DraftIntake, slots: Tensor, wanted: Tensor | None, sent: Sent) -> None:
        self._intake, self._slots, self._wanted, self._sent = intake, slots, wanted, sent
        self._checked: tuple[TokenTree | None] | None = None
        self._taken: tuple[TakenTrees | None] | None = None

    @classmethod
    def of_checked(cls, intake: DraftIntake, slots: Tensor, trees: TokenTree) -> "HostTrees":
        """Trees by decode that are believed as they are."""
        return cls(intake, slots, None, Sent(tuple(field.contiguous() for field in trees), None, None))

    @property
    def num_nodes(self) -> int:
        """Nodes of each tree as it came, the root included."""
        return self._sent.trees[0].shape[1]

    def checked(self) -> TokenTree | None:
        """A tree per decode, as wide as the widest, a bare root where what came does not count; None where none
        counts."""
        if self._checked is None:
            found = self._intake.check(self._slots, self._wanted, self._sent)
            self._checked = (None if found is None else TokenTree(*found),)
        return self._checked[0]

    def take(self, by: NodeChoice | None = None) -> TakenTrees | None:
        """Choose what is verified; None where no tree counts.

        Args:
            by: None verifies all that counts.
        """
        self._taken = (self._intake.take(self._slots, self._wanted, self._sent, by),)
        return self._taken[0]

    def verified(self) -> VerifiedTrees | None:
        """Nodes to verify: those that were taken, or all; None where bare roots are."""
        taken = self.take() if self._taken is None else self._taken[0]
        if taken is None or taken.is_bare:
            return None
        trees = VerifiedTrees(*taken.trees)
        trees.decodes = PackedDecodes.of(self._slots, taken)
        return trees


class HostInbox:
    """Makes `HostTrees` of the replies of a channel."""

    def __init__(self, intake: DraftIntake) -> None:
        self._intake = intake
        self._sent: dict[int, tuple[TreeReply, Sent]] = {}
        """By the id of the reply it is of; a channel has two replies, which take turns."""

    def collect(self, reply: TreeReply, rows: DecodeRows) -> HostTrees:
        """Reply of a drafter, unchecked."""
        if id(reply) not in self._sent:
            if len(self._sent) == 2:  # of a channel that makes its replies anew
                self._sent.clear()
            trees = (reply.token_ids, reply.parents, reply.depths, reply.scores, reply.num_valid)
            self._sent[id(reply)] = reply, Sent(trees, reply.epochs, reply.committed_lens)
        return HostTrees(self._intake, rows.slots, rows.wanted, self._sent[id(reply)][1])
