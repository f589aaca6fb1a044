"""C++ choice of the nodes that pay: nodes and evidence are those of the references."""

import random

import numpy as np
import pytest
import torch

from tests.runtime.adaptive.reference_choice import best_nodes, drafted_trees, pack_evidence
from tests.runtime.cpu.round.test_intake import (
    NUM_NODES,
    assert_alike,
    believed_by_torch,
    by_torch,
    engine_state,
    intake_of,
    sent,
)
from wingbeat.kernels.cpu.drafted import NodeChoice
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.tree.reference import ancestor_words
from wingbeat.runtime.adaptive.acceptance import EDGES, Acceptance, path_probabilities, unpack_evidence
from wingbeat.runtime.adaptive.pruning import keep_nodes
from wingbeat.runtime.cpu.round.host_trees import HostInbox

pytestmark = [pytest.mark.few(4), pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")]


def kept_nodes(trees, kinds, acceptance, useful, forced, prices, max_depth):
    """By the reference: the trees as arrays, and a mask of the nodes that are kept."""
    parts = (trees.parents, trees.depths, trees.scores, trees.num_valid)
    reference = drafted_trees(*(part.numpy() for part in parts), max_depth)
    each = [path_probabilities(acceptance.table[kinds[[row]]], reference.rows([row]))[0] for row in range(len(kinds))]
    path, within = np.stack(each), reference.real & (reference.depths <= useful[:, None])
    return reference, best_nodes(path, within, prices) | (within & forced[:, None])


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("price", [None, 0.0, 0.02, 0.2, 3.0])
@pytest.mark.parametrize("seed", range(12))
def test_one_call_takes_what_the_references_take_one_by_one(seed, price, chains):
    """Cases include ties: of equally likely nodes the earlier ones are kept."""
    rng = random.Random(seed * 7 + 1)
    config, state = engine_state(rng, chains=chains)
    reply, rows = sent(rng, state, chains=chains)
    if seed % 4 == 0:
        reply.scores[int(rows.slots[0]), -1] = float("nan")
    acceptance, max_depth, count = Acceptance(), 4, len(rows.slots)
    useful, forced = [rng.randrange(6) for _ in range(count)], [rng.random() < 0.2 for _ in range(count)]
    prices = None if price is None else price * np.arange(count * NUM_NODES + 1.0)
    believed = believed_by_torch(reply, rows, state, chains)

    arrived = HostInbox(intake_of(config, state)).collect(reply, rows)
    by = (None if part is None else torch.from_numpy(part) for part in (acceptance.table, EDGES, prices))
    by_request = [rng.randrange(len(acceptance.table)) for _ in range(count)]
    taken = arrived.choose_nodes(NodeChoice(*by, useful, forced, by_request, max_depth))

    assert (taken is None) == (believed is None)
    if believed is None:
        return
    kinds = np.array(by_request)
    reference, kept = kept_nodes(believed, kinds, acceptance, np.array(useful), np.array(forced), prices, max_depth)
    width = believed.token_ids.shape[1]
    assert np.array_equal(taken.evidence[:, :width].numpy(), pack_evidence(reference, kept))
    assert not unpack_evidence(taken.evidence[:, width:].numpy())[0].real.any()
    assert taken.num_drafting == int((believed.num_valid > 1).sum())
    assert taken.levels == int(believed.depths.max())
    assert taken.is_bare == (not kept.any())
    pruned = keep_nodes(believed, torch.from_numpy(kept), int(1 + kept.sum(axis=1).max()))
    if taken.is_bare:
        assert arrived.verified() is None
        return
    found, expected = arrived.verified().decodes, by_torch(config, state).decodes(rows.slots, pruned)
    assert_alike(found, expected)
    longest = int(expected.roots.max()) + expected.token_ids.shape[1]
    blocks = min(-(-longest // config.block_size), config.max_blocks_per_seq)
    assert torch.equal(found.segment.block_tables[:, :blocks], state.block_tables[rows.slots, :blocks])
    assert (found.segment.mask_words is None) == chains
    if not chains:
        real = torch.arange(found.token_ids.shape[1]) < found.tree.num_valid[:, None]
        assert torch.equal(found.segment.mask_words[real], ancestor_words(found.tree.parents)[real])
