"""How much of each chain is worth verifying: in plain numbers, which for a few chains are quicker than arrays."""

from typing import NamedTuple

from wingbeat.runtime.packing import worth_packing


class TokenCosts(NamedTuple):
    """What a pass takes, in tokens that could be had in that time."""

    nodes: list[float]
    """[n]: of verifying n drafted nodes in all; [0] of a plain pass."""
    padding: float
    """Share of a node's cost that is paid for a padded one, too: 0 to 1."""


def cut_chains(paths: list[list[float]], costs: TokenCosts) -> list[int]:
    """How many nodes of each chain to verify, over all of them together.

    For every length that the longest may have: either all chains are cut to it, or each to what its likeliest nodes
    are, and then attention is paid up to that length anyway.

    Args:
        paths: by chain, the path probability of each drafted node.
    """
    num_reqs, nodes, share = len(paths), costs.nodes, costs.padding
    likeliest = sorted(
        [(-probability, depth, row) for row, path in enumerate(paths) for depth, probability in enumerate(path, 1)]
    )
    most, length, num_kept, level_gain = -nodes[0], 0, None, 0.0
    for this in range(1, max(map(len, paths)) + 1):
        level_gain += sum([path[this - 1] for path in paths if len(path) >= this])
        num_padded = num_reqs * this
        if level_gain - nodes[num_padded] > most:
            most, length, num_kept = level_gain - nodes[num_padded], this, None
        fixed, gain, count, reached = share * nodes[num_padded], 0.0, 0, False
        for probability, depth, _ in likeliest:
            if depth > this:
                continue
            gain, count, reached = gain - probability, count + 1, reached or depth == this
            value = gain - (1 - share) * nodes[count] - fixed
            if value > most and reached and worth_packing(num_reqs + count, num_reqs + num_padded):
                most, length, num_kept = value, this, count
    if num_kept is None:
        return [min(len(path), length) for path in paths]
    kept = [0] * num_reqs
    for _, _, row in [node for node in likeliest if node[1] <= length][:num_kept]:
        kept[row] += 1
    return kept
