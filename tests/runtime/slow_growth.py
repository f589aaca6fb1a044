"""EAGLE-2 growth in plain Python over full contexts: what drafters that run transformers' layers are compared with."""

import torch

from tests.near_ties import check_same_trees
from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.runtime.protocol.messages import TokenTree


def slow_tree(tokens, logits_of, speculation, temperature=0.0, seed=0, max_levels=None):
    """(token, parent, depth, score) by node of the tree over a sequence.

    Args:
        tokens: of the sequence; the last one is the root.
        logits_of: path of drafted tokens -> float logits [vocab_size] of what follows it.
    """
    length = len(tokens)

    def children(path):
        scores = logits_of(path).double()
        if temperature > 0:
            ids = torch.arange(len(scores))
            noise = gumbel_noise(torch.tensor([seed]), torch.tensor([length + len(path)]), ids)
            scores = scores / temperature + noise[0].double()
        best = scores.log_softmax(-1).topk(speculation.draft_top_k)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    # An entry is (token, parent entry, depth, score, path).
    table = [(tokens[-1], -1, 0, 0.0, [])]
    frontier = [0]
    for _ in range(min(speculation.max_path - 1, max_levels or 99)):
        added = []
        for entry in frontier:
            _, _, depth, score, path = table[entry]
            for token, log_prob in children(path):
                added.append(len(table))
                table.append((token, entry, depth + 1, score + log_prob, [*path, token]))
        frontier = sorted(added, key=lambda entry: (-table[entry][3], entry))[: speculation.draft_top_k]
    best = sorted(range(1, len(table)), key=lambda entry: (-table[entry][3], entry))
    kept = [0, *sorted(best[: speculation.num_nodes - 1])]
    number = {entry: index for index, entry in enumerate(kept)}
    return [(table[entry][0], number.get(table[entry][1], -1), *table[entry][2:4]) for entry in kept]


def assert_tree(tree, row, expected):
    """A row of a drafted tree is the slow one, up to near-ties."""
    columns = (torch.tensor([column]) for column in zip(*expected, strict=True))
    found = (part[row : row + 1, : len(expected)] for part in tree[:4])
    wanted = TokenTree(*columns, torch.tensor([len(expected)]))
    check_same_trees(TokenTree(*found, tree.num_valid[row : row + 1]), wanted)
