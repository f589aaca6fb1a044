"""Draft trees on the host, before and after the trees are checked, and the nodes chosen for verification."""

from torch import Tensor

from wingbeat.kernels.cpu.drafted import DraftIntake, NodeChoice, ReplyTensors, TakenTrees
from wingbeat.runtime.cpu.round.packed_rows import PackedDecodes, VerifiedTrees
from wingbeat.runtime.protocol.messages import TokenTree, TreeReply
from wingbeat.runtime.round.slots import DecodeRows


class HostTrees:
    """Trees of one round's decodes.

    A single C++ call checks the trees, chooses the nodes to verify and lays the nodes out.

    Args:
        wanted: bool [num_decodes]: whether a tree was requested for each decode; None if the trees are already checked.
    """

    def __init__(self, intake: DraftIntake, slots: Tensor, wanted: Tensor | None, sent: ReplyTensors) -> None:
        self._intake, self._slots, self._wanted, self._sent = intake, slots, wanted, sent
        self._checked: tuple[TokenTree | None] | None = None
        self._taken: tuple[TakenTrees | None] | None = None

    @classmethod
    def of_checked(cls, intake: DraftIntake, slots: Tensor, trees: TokenTree) -> "HostTrees":
        """Wraps trees that need no check, one per decode."""
        return cls(intake, slots, None, ReplyTensors(tuple(field.contiguous() for field in trees), None, None))

    @property
    def num_nodes(self) -> int:
        """Number of nodes of each received tree, including the root."""
        return self._sent.trees[0].shape[1]

    def checked(self) -> TokenTree | None:
        """Returns one tree per decode, padded to the widest; the tree of a rejected draft is a bare root.

        Returns None if all drafts are rejected.
        """
        if self._checked is None:
            found = self._intake.check(self._slots, self._wanted, self._sent)
            self._checked = (None if found is None else TokenTree(*found),)
        return self._checked[0]

    def choose_nodes(self, by: NodeChoice | None = None) -> TakenTrees | None:
        """Chooses the nodes to verify; returns None if all trees are rejected.

        Args:
            by: how to choose nodes; None verifies all accepted trees completely.
        """
        self._taken = (self._intake.lay_out(self._slots, self._wanted, self._sent, by),)
        return self._taken[0]

    def verified(self) -> VerifiedTrees | None:
        """Returns trees of the chosen nodes, or of all nodes if `choose_nodes` was not called; None if only bare roots
        are verified.
        """
        taken = self.choose_nodes() if self._taken is None else self._taken[0]
        if taken is None or taken.is_bare:
            return None
        trees = VerifiedTrees(*taken.trees)
        trees.decodes = PackedDecodes.of(self._slots, taken)
        return trees


class HostInbox:
    """Wraps the replies of a channel as `HostTrees`."""

    def __init__(self, intake: DraftIntake) -> None:
        self._intake = intake
        self._sent: dict[int, tuple[TreeReply, ReplyTensors]] = {}
        """Replies and their wrapped tensors, by `id` of the reply object. A channel has two replies, which are used in
        turn.
        """

    def collect(self, reply: TreeReply, rows: DecodeRows) -> HostTrees:
        """Returns a drafter's reply as unchecked trees."""
        if id(reply) not in self._sent:
            if len(self._sent) == 2:  # a third reply can only come after the channel has created new replies
                self._sent.clear()
            trees = (reply.token_ids, reply.parents, reply.depths, reply.scores, reply.num_valid)
            self._sent[id(reply)] = reply, ReplyTensors(trees, reply.epochs, reply.committed_lens)
        return HostTrees(self._intake, rows.slots, rows.wanted, self._sent[id(reply)][1])
