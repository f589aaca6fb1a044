"""Merges text trees into a round's drafter trees."""

import numpy as np
import torch

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.plan import SchedulerOutput
from wingbeat.runtime.suffix.suffix_texts import TextNode


def add_nodes_on_host(plan: SchedulerOutput, trees: TokenTree | None, shape: SpeculationConfig) -> TokenTree | None:
    """See `runtime.parts`; the result is as wide as its widest tree."""
    made = _made(plan)
    if not made:
        return trees
    width = max(1 + max(map(len, made.values())), 1 if trees is None else trees.token_ids.shape[1])
    return _with_text(len(plan.decodes), trees, made, width)


def add_nodes(
    plan: SchedulerOutput, trees: TokenTree | None, shape: SpeculationConfig, device: torch.device
) -> TokenTree | None:
    """See `runtime.parts`; the result has the maximum tree width."""
    made = _made(plan)
    if not made:
        return trees
    if trees is None:
        whole = _with_text(len(plan.decodes), None, made, shape.num_nodes)
        return TokenTree(*(upload(field.tolist(), device, field.dtype) for field in whole))
    own = _with_text(len(made), None, dict(enumerate(made.values())), trees.token_ids.shape[1])
    rows = upload([*made], device)
    uploaded = (upload(field.tolist(), device, field.dtype) for field in own)
    return TokenTree(*(field.index_copy(0, rows, mine) for field, mine in zip(trees, uploaded, strict=True)))


def _made(plan: SchedulerOutput) -> dict[int, list[TextNode]]:
    """Nodes of text trees by decode row, for decodes that have KV blocks for the nodes."""
    rows = zip(plan.decodes, plan.with_texts(), strict=True)
    return {row: seq.draft.text_tree for row, (seq, is_made) in enumerate(rows) if is_made}


def _with_text(num_reqs: int, trees: TokenTree | None, made: dict[int, list[TextNode]], width: int) -> TokenTree:
    """The merged trees, on the host. A row with neither a drafter tree nor a text tree gets a bare root."""
    token_ids, parents, depths = np.zeros((3, num_reqs, width), np.int64)
    scores, num_valid = np.zeros((num_reqs, width), np.float32), np.ones(num_reqs, np.int64)
    parents[:, 0] = -1
    columns = token_ids, parents, depths, scores
    if trees is not None:
        num_valid[:] = trees.num_valid.numpy()
        for column, field in zip(columns, trees, strict=False):
            column[:, : field.shape[1]] = field.numpy()
    for row, nodes in made.items():
        end = num_valid[row] = 1 + len(nodes)
        for column, values in zip(columns, zip(*(node[:4] for node in nodes), strict=True), strict=True):
            column[row, 1:end] = values
    return TokenTree(*(torch.from_numpy(column) for column in (*columns, num_valid)))
