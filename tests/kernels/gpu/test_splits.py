"""Splits of a batch's contexts, and the programs that are launched for them."""

import pytest
import torch

from tests.kernels.attention_cases import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from wingbeat.kernels.gpu.attention import launch as triton_attention
from wingbeat.kernels.gpu.attention.device import KNOWN
from wingbeat.kernels.gpu.attention.splits import Splits, choose_splits, count_further_splits, find_further_split
from wingbeat.kernels.gpu.attention.tiles import TileConfig

NUM_NEW, BLOCK_KEYS, WIDE = 5, 16, 1 << 20


@triton.jit(do_not_specialize=["num_reqs", "num_new", "max_keys", "most_splits", "least_keys", "step"])
def list_splits(
    out_ptr,  # int32 [num_items, 2]
    context_ptr,
    num_reqs,
    num_new,
    window,
    max_keys,
    most_splits,
    least_keys,
    step,
    BLOCK_KEYS: tl.constexpr,
):
    total = count_further_splits(context_ptr, num_reqs, num_new, window, max_keys, most_splits, least_keys, BLOCK_KEYS)
    for item in range(0, total, step):
        req, split = find_further_split(
            item, context_ptr, num_reqs, num_new, window, max_keys, most_splits, least_keys, BLOCK_KEYS
        )
        tl.store(out_ptr + 2 * item, req)
        tl.store(out_ptr + 2 * item + 1, split)


def expected(contexts: list[int], splits: Splits, window: int | None, max_keys: int) -> list[list[int]]:
    """(request, split) of every item behind the first splits, counted one by one."""
    items = []
    for req, context in enumerate(contexts):
        length = context + NUM_NEW
        if window is not None:
            length = min(length, window + NUM_NEW + BLOCK_KEYS)
        tiles = -(-length // BLOCK_KEYS)
        keys = max(-(-tiles // splits.most) * BLOCK_KEYS, splits.least_keys)
        items += [[req, split] for split in range(1, -(-min(length, max_keys) // keys))]
    return items


@pytest.mark.few(3)
@pytest.mark.parametrize(("window", "max_keys"), [(None, WIDE), (None, 96), (70, WIDE)])
@pytest.mark.parametrize(("num_reqs", "step"), [(1, 1), (7, 1), (259, 29)])
def test_items_are_the_further_splits_of_one_request_after_another(num_reqs, step, window, max_keys):
    """Also where a program cannot read all lengths at once, where a table ends within a context, and where a module
    looks further ahead than its sequence is long."""
    contexts = [*((37 * req) % 331 if req % 5 else -7 * (req % 2) for req in range(num_reqs - 1)), 1000]
    splits = Splits(6, 2 * BLOCK_KEYS)
    items = expected(contexts, splits, window, max_keys)
    out = torch.full((len(items) + 1, 2), -1, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(contexts, device=DEVICE)
    list_splits[(1,)](out, lengths, num_reqs, NUM_NEW, window, max_keys, *splits, step, BLOCK_KEYS=BLOCK_KEYS)
    assert out[::step].tolist() == [*items, [-1, -1]][::step]
    assert (out[-1] == -1).all(), "an item behind the last"
    most = splits.at_most(max_keys if window is None else window + NUM_NEW + BLOCK_KEYS)
    assert all(split < most for _, split in items)


@pytest.fixture
def launched(monkeypatch) -> list[tuple[int, ...]]:
    """Grids of the attention kernel, which is not run."""
    grids: list[tuple[int, ...]] = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: grids.append(grid)

    monkeypatch.setattr(triton_attention, "tree_attention_kernel", Recorded())
    monkeypatch.setattr(triton_attention, "merge_splits_kernel", Recorded())
    return grids


def launch(num_reqs: int, width: int, splits: Splits, num_query: int = 1) -> None:
    """Llama-3.1-8B's shapes without their memory: eight KV heads, blocks of 16, one row tile."""
    query = torch.empty(num_reqs, num_query, 32, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(9, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    tables, contexts = (
        torch.empty(size, dtype=torch.int64, device="meta") for size in ((num_reqs, width), (num_reqs,))
    )
    config = TileConfig(16, 64, 4, 5, 0)
    triton_attention.tree_attention(
        query, cache, cache, tables, contexts, None, None, 0.1, config=config, splits=splits
    )


@pytest.mark.parametrize("num_reqs", [1, 4, 16, 128, 256])
@pytest.mark.parametrize("max_keys", [8192, 131072])
def test_a_launch_fills_the_device_a_few_times_and_not_once_for_each_split_of_the_table(launched, num_reqs, max_keys):
    """A captured launch has no lengths, only tables as wide as the longest context."""
    at_once = KNOWN["H100"].num_sms * 3
    splits = choose_splits(num_reqs, 8, at_once, TileConfig(16, 64, 4, 5, 0))
    launch(num_reqs, max_keys // 16, splits)
    (programs,), (merged, heads) = launched
    each = splits.at_most(max_keys)
    assert programs <= num_reqs * each * 8
    assert programs <= num_reqs * 8 + 4 * at_once
    assert programs >= min(num_reqs * each * 8, 3 * at_once), "the device is not filled"
    assert merged == num_reqs
    assert 4096 <= merged * heads <= 8192 or heads == 32


def test_one_split_is_launched_as_it_always_was(launched):
    launch(128, 4, Splits(43, 128))
    assert launched == [(128 * 8,)]
