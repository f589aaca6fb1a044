"""How much of each chain is worth verifying: in plain numbers, which for a few chains are quicker than arrays."""

from typing import NamedTuple

from wingbeat.runtime.packing import worth_packing


class TokenCosts(NamedTuple):
    """What a pass takes, in tokens that could be had in that time."""

    nodes: list[float]
    """[n]: of verifying n drafted nodes in all."""
    packing: float
    """Added where trees have to be packed."""

    def value(self, gain: float, num_reqs: int, num_extra: int, longest: int) -> float:
        """`gain` expected tokens, less what verifying `num_extra` nodes of chains up to `longest` takes."""
        if worth_packing(num_reqs + num_extra, num_reqs * (1 + longest)):
            return gain - self.nodes[num_extra] - self.packing
        return gain - self.nodes[num_reqs * longest]


def cut_chains(paths: list[list[float]], costs: TokenCosts) -> list[int]:
    """How many nodes of each chain to verify, over all of them together.

    Chains of one length need no packing, and what packing would save may be less than it takes: either all are cut to
    one length, or each to what its likeliest nodes are.

    Args:
        paths: by chain, the path probability of each drafted node.
    """
    length, gain, num_extra, most = 0, 0.0, 0, -costs.nodes[0]
    for this in range(1, max(map(len, paths)) + 1):
        level = [path[this - 1] for path in paths if len(path) >= this]
        gain, num_extra = gain + sum(level), num_extra + len(level)
        value = costs.value(gain, len(paths), num_extra, this)
        if value > most:
            most, length = value, this
    likeliest, gain = _likeliest(paths, costs.nodes)
    if costs.value(gain, len(paths), sum(likeliest), max(likeliest)) > most:
        return likeliest
    return [min(len(path), length) for path in paths]


def _likeliest(paths: list[list[float]], costs: list[float]) -> tuple[list[int], float]:
    """How many nodes of each chain to verify where each one costs what it costs alone, and the tokens they are worth.

    Args:
        costs: [n]: of n nodes, in tokens.
    """
    likeliest = sorted([(-probability, row) for row, path in enumerate(paths) for probability in path])
    best, gain, best_gain, most = 0, 0.0, 0.0, -costs[0]
    for count, (probability, _) in enumerate(likeliest, start=1):
        gain -= probability
        if gain - costs[count] > most:
            best, best_gain, most = count, gain, gain - costs[count]
    kept = [0] * len(paths)
    for _, row in likeliest[:best]:
        kept[row] += 1
    return kept, best_gain
