"""Trees on the host by the CPU's kernels: the paths that the target chooses."""

import platform
import random

import pytest
import torch

from tests.kernels.slow_trees import random_parents
from wingbeat.kernels.cpu import library
from wingbeat.kernels.cpu.accept import Compacted, Decree
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.kernels.kv.reference import copy_kv, slot_mapping
from wingbeat.kernels.tree.forced import forced_walk
from wingbeat.kernels.tree.reference import walk_tree
from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.round.forced_acceptance import AcceptanceForcer

pytestmark = [pytest.mark.few(4), pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")]
NUM_REQS, NUM_SLOTS = 16, 20
BUILDS = {"x86-64": "sse2", "x86-64-v3": "avx2"}
"""Processor feature that a build needs, by its `-march`."""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize(("num_nodes", "longest"), [(1, 1), (8, 1), (8, 3), (8, 8), (41, 7)])
def test_paths_are_the_references_and_slots_go_on_to_their_ends(num_nodes, longest, shape, dtype, packed):
    rng = random.Random(num_nodes * 100 + longest)
    parents = random_parents(rng, NUM_REQS, num_nodes, shape)
    tokens, targets = (
        torch.tensor([[rng.randrange(2) + 1 for _ in range(num_nodes)] for _ in range(NUM_REQS)]) for _ in range(2)
    )
    num_valid = torch.tensor([rng.randrange(0, num_nodes + 1) for _ in range(NUM_REQS)])
    slots = torch.tensor(rng.sample(range(NUM_SLOTS), NUM_REQS))
    lens, last = torch.arange(NUM_SLOTS), torch.zeros(NUM_SLOTS, dtype=torch.int64)
    rows = torch.randperm(NUM_REQS * num_nodes, generator=torch.Generator().manual_seed(0)).view(tokens.shape)
    by_row, order = targets.flatten(), rows if packed else None
    if packed:
        by_row = torch.empty_like(by_row).scatter_(0, rows.flatten(), by_row)
    taps = torch.arange(3.0 * NUM_REQS * num_nodes).view(-1, 3).to(dtype)

    acceptance = cpu_kernels().tree_acceptance(lens, last)
    found = acceptance.accept(
        slots, tokens, parents, num_valid, by_row, order, taps, longest=longest, width=longest + 2
    )

    walk = walk_tree(tokens, parents, num_valid, targets, longest)
    assert torch.equal(found.nodes, walk.nodes)
    assert torch.equal(found.num_tokens, walk.num_tokens)
    assert torch.equal(found.token_ids[:, :longest], walk.token_ids)
    assert not found.token_ids[:, longest:].any()
    where = rows if packed else torch.arange(NUM_REQS * num_nodes).view(tokens.shape)
    assert torch.equal(found.taps, taps[where.gather(1, walk.nodes)])
    steps = torch.arange(longest)
    assert found.moved == bool(((steps < walk.num_tokens[:, None]) & (walk.nodes != steps)).any())
    assert torch.equal(lens[slots], slots + walk.num_tokens)
    assert torch.equal(last[slots], walk.token_ids.gather(1, walk.num_tokens[:, None] - 1)[:, 0])
    others = torch.ones(NUM_SLOTS, dtype=torch.bool).index_fill_(0, slots, False)
    assert torch.equal(lens[others], torch.arange(NUM_SLOTS)[others])


@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize("rates", [(0.5,), (0.9, 0.5, 1.0, 0.1), (0.0,), (1.0,)])
def test_a_decree_is_followed_as_the_reference_follows_it(rates, shape):
    rng, num_nodes, depth = random.Random(7), 12, 5
    parents = random_parents(rng, NUM_REQS, num_nodes, shape)
    tokens = torch.tensor([[rng.randrange(3) + 1 for _ in range(num_nodes)] for _ in range(NUM_REQS)])
    targets = torch.tensor([[rng.randrange(3) + 1 for _ in range(num_nodes)] for _ in range(NUM_REQS)])
    num_valid = torch.tensor([rng.randrange(1, num_nodes + 1) for _ in range(NUM_REQS)])
    slots, epochs = torch.tensor(rng.sample(range(NUM_SLOTS), NUM_REQS)), torch.arange(NUM_SLOTS) * 977 + 3
    roots = torch.arange(NUM_REQS) * 31 + 5
    forcer = AcceptanceForcer(ForcedAcceptance(rates), depth, epochs)
    lens, last = torch.zeros(NUM_SLOTS, dtype=torch.int64), torch.zeros(NUM_SLOTS, dtype=torch.int64)

    found = (
        cpu_kernels()
        .tree_acceptance(lens, last)
        .accept(
            slots,
            tokens,
            parents,
            num_valid,
            targets.flatten(),
            None,
            None,
            longest=depth + 1,
            width=depth + 1,
            decree=Decree(forcer.limits, epochs, roots),
        )
    )

    walk = forced_walk(tokens, parents, num_valid, targets, forcer.draws(slots, roots), depth + 1)
    assert torch.equal(found.nodes, walk.nodes)
    assert torch.equal(found.num_tokens, walk.num_tokens)
    assert torch.equal(found.token_ids, walk.token_ids)
    assert torch.equal(lens[slots], walk.num_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", ["random", "star"])
def test_keys_and_values_follow_their_paths_as_the_cache_moves_them(shape, dtype):
    rng, num_nodes, longest, block_size, width = random.Random(11), 12, 6, 4, 9
    parents = random_parents(rng, NUM_REQS, num_nodes, shape)
    tokens, targets = (
        torch.tensor([[rng.randrange(2) + 1 for _ in range(num_nodes)] for _ in range(NUM_REQS)]) for _ in range(2)
    )
    num_valid = torch.full((NUM_REQS,), num_nodes)
    slots = torch.tensor(rng.sample(range(NUM_SLOTS), NUM_REQS))
    lens = torch.tensor([rng.randrange(1, width * block_size - num_nodes) for _ in range(NUM_SLOTS)])
    tables = 1 + torch.randperm(NUM_SLOTS * width, generator=torch.Generator().manual_seed(1)).view(NUM_SLOTS, width)
    num_blocks = 1 + NUM_SLOTS * width
    # Keys and values may be of different widths.
    layers = [tuple(torch.randn(num_blocks, block_size, 2, dim).to(dtype) for dim in (8, 5)) for _ in range(3)]
    expected = [tuple(part.clone() for part in layer) for layer in layers]
    roots = lens[slots] - 1
    pools = [part for layer in layers for part in layer]
    acceptance = cpu_kernels().tree_acceptance(lens, torch.zeros_like(lens), Compacted(pools, tables))
    chosen = targets.flatten()
    found = acceptance.accept(slots, tokens, parents, num_valid, chosen, None, None, longest=longest, width=longest)

    steps = torch.arange(longest)
    moved = (steps < found.num_tokens[:, None]) & (found.nodes != steps)
    assert moved.any()
    source, target = (
        slot_mapping(tables[slots], roots[:, None] + stored, block_size, moved) for stored in (found.nodes, steps)
    )
    copy_kv(expected, source, target)
    for ours, theirs in zip(pools, [part for layer in expected for part in layer], strict=True):
        # Moves that are dropped go to block 0, which belongs to nobody.
        assert torch.equal(ours[1:].view(torch.uint8), theirs[1:].view(torch.uint8))


def odd_logits(rng, num_rows, vocab_size):
    """Few different numbers, so that there are equal ones; here and there none, or one beyond all others."""
    logits = torch.tensor([[float(rng.randrange(4)) for _ in range(vocab_size)] for _ in range(num_rows)])
    for number in (float("nan"), float("nan"), float("inf"), -float("inf"), -0.0):
        logits[rng.randrange(num_rows), rng.randrange(vocab_size)] = number
    logits[rng.randrange(num_rows)] = -float("inf")
    return logits


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 3, 15, 16, 17, 67])
def test_the_best_tokens_are_found_along_the_paths(vocab_size, bare):
    """As `argmax` finds them, and as if all of them had been given."""
    check_best_tokens(cpu_kernels(), vocab_size, bare)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="builds of x86 processors")
@pytest.mark.parametrize("march", BUILDS)
def test_builds_for_narrower_registers_find_likewise(march, tmp_path, monkeypatch):
    if BUILDS[march] not in library._processor():
        pytest.skip(f"this processor has no {BUILDS[march]}")
    monkeypatch.setenv(library.ARCHITECTURE, march)
    kernels = CpuKernels(tmp_path)
    for vocab_size in (1, 3, 15, 16, 17, 67):
        check_best_tokens(kernels, vocab_size, bare=False)


def check_best_tokens(kernels, vocab_size, bare):
    rng, num_nodes = random.Random(vocab_size), 1 if bare else 8
    for _ in range(10):
        parents = random_parents(rng, NUM_REQS, num_nodes, "random")
        tokens = torch.tensor([[rng.randrange(vocab_size) for _ in range(num_nodes)] for _ in range(NUM_REQS)])
        num_valid = torch.tensor([rng.randrange(1, num_nodes + 1) for _ in range(NUM_REQS)])
        logits = odd_logits(rng, NUM_REQS * num_nodes, vocab_size)
        slots, given = torch.arange(NUM_REQS), (None, None) if bare else (parents, num_valid)
        found, expected = (
            kernels.tree_acceptance(*torch.zeros(2, NUM_REQS, dtype=torch.int64)).accept(
                slots, tokens, *given, targets, None, None, longest=num_nodes, width=num_nodes
            )
            for targets in (logits, logits.argmax(dim=1))
        )
        for one, other in zip(found[:3], expected[:3], strict=True):
            assert torch.equal(one, other)
        if bare:
            assert torch.equal(found.token_ids[:, 0], logits.argmax(dim=1))
            assert found.num_tokens.tolist() == [1] * NUM_REQS
