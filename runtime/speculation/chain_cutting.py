"""How much of each chain is worth verifying: in plain numbers, which for a few chains are quicker than arrays."""

from dataclasses import dataclass
from functools import cached_property

from wingbeat.runtime.speculation.padding import worth_packing


@dataclass(frozen=True)
class TokenCosts:
    """What a pass takes, in tokens that could be had in that time."""

    nodes: list[float]
    """[n]: of verifying n drafted nodes in all; [0] of a plain pass."""
    padding: float
    """Share of a node's cost that is paid for a padded one, too: 0 to 1."""

    @cached_property
    def node(self) -> float:
        """Of one more node, on average."""
        return (self.nodes[-1] - self.nodes[1]) / max(len(self.nodes) - 2, 1)


def cut_chains(paths: list[list[float]], costs: TokenCosts) -> list[int]:
    """How many nodes of each chain to verify, over all of them together.

    For every length that the longest may have: either all chains are cut to it, or each to the nodes that are worth
    what they take beside padding, since attention is then paid up to that length anyway. The best choice there is where
    every node costs the same.

    Args:
        paths: by chain, the path probability of each drafted node: never more than the one before.
    """
    num_reqs, nodes, share = len(paths), costs.nodes, costs.padding
    price, deepest = (1.0 - share) * costs.node, max(map(len, paths))
    gains, worth_gains, num_worth = [0.0] * deepest, [0.0] * deepest, [0] * deepest
    for path in paths:
        for level, probability in enumerate(path):
            gains[level] += probability
            if probability >= price:
                worth_gains[level] += probability
                num_worth[level] += 1
    most, length, ragged = -nodes[0], 0, False
    gain = worth_gain = 0.0
    count = 0
    for level in range(deepest):
        num_padded = num_reqs * (level + 1)
        gain, worth_gain, count = gain + gains[level], worth_gain + worth_gains[level], count + num_worth[level]
        if gain - nodes[num_padded] > most:
            most, length, ragged = gain - nodes[num_padded], level + 1, False
        value = worth_gain - (1.0 - share) * nodes[count] - share * nodes[num_padded]
        if value > most and num_worth[level] and worth_packing(num_reqs + count, num_reqs + num_padded):
            most, length, ragged = value, level + 1, True
    least = price if ragged else 0.0
    return [sum([probability >= least for probability in path[:length]]) for path in paths]
