"""The step of attention over latents: the kernel against its reference, and this against transformers."""

from functools import partial

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from tests.kernels.drawn import draw
from wingbeat.kernels.attention.reference import tree_attention
from wingbeat.kernels.latent_attention.reference import Pairs, keep_latents, store_latents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 4
SIZES = {"deep": (3, 16, 8, 16), "odd": (5, 12, 6, 20)}
"""Heads, plain and rotated elements of keys, and elements of values."""


drawn = partial(draw, dtype=torch.float32)


def inputs(size, dtype):
    """Queries and rotated parts that are parts of wider rows."""
    num_heads, plain, turned, value_dim = size
    wide = draw(5, num_heads * (plain + turned) + 9, dtype=dtype, seed=0)
    query = wide[:, 9:].unflatten(1, (num_heads, -1))
    made, shared = draw(5, num_heads, plain + value_dim, dtype=dtype, seed=1), draw(5, 3 + turned, dtype=dtype, seed=2)
    angles = torch.arange(5)[:, None] * 0.9 ** torch.arange(turned // 2)
    cos, sin = (wave.repeat(1, 2).to(DEVICE, dtype) for wave in (angles.cos(), angles.sin()))
    return query, made, shared[:, 3:], cos, sin


def caches(size, dtype):
    num_heads, plain, turned, value_dim = size
    shape = 5, BLOCK_SIZE, num_heads
    return [torch.full((*shape, dim), float("nan"), dtype=dtype, device=DEVICE) for dim in (plain + turned, value_dim)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("pairs", Pairs)
@pytest.mark.parametrize("size", SIZES)
def test_rows_go_where_the_reference_puts_them(size, pairs, dtype):
    kernels = pytest.importorskip("wingbeat.kernels.latent_attention.triton")
    given, slots = inputs(SIZES[size], dtype), torch.tensor([1, 7, 4, 3, 15], device=DEVICE)  # two are dropped
    found, expected = caches(SIZES[size], dtype), [part.cpu() for part in caches(SIZES[size], dtype)]
    query = kernels.store_latents(*given, *found, slots, pairs)
    theirs = store_latents(*(part.cpu() for part in given), *expected, slots.cpu(), pairs)
    assert torch.equal(query.cpu(), theirs)
    for ours, their in zip(found, expected, strict=True):
        assert ours[0].isnan().all(), "a row to be dropped was written"
        assert torch.equal(ours[1:].cpu().nan_to_num(9.0), their[1:].nan_to_num(9.0))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("pairs", Pairs)
@pytest.mark.parametrize("size", SIZES)
def test_latents_go_where_the_reference_puts_them(size, pairs, cache_dtype):
    kernels = pytest.importorskip("wingbeat.kernels.latent_attention.triton")
    (num_heads, plain, turned, rank), slots = SIZES[size], torch.tensor([1, 7, 4, 3, 15], device=DEVICE)
    query, _, shared, cos, sin = inputs(SIZES[size], torch.float32)
    latent, absorbed = drawn(5, rank + 7, seed=3)[:, 7:], drawn(num_heads, plain, rank, seed=4)
    if cache_dtype == torch.float8_e4m3fn:  # Triton's interpreter does not round to the nearest float8
        latent, shared = (part.to(cache_dtype).float() for part in (latent, shared))
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    cache = torch.full((5, BLOCK_SIZE, 1, rank + turned), 2.0, device=DEVICE).to(cache_dtype)
    expected = cache.cpu().clone()
    given = [part.cpu() for part in (query, absorbed, latent, shared, cos, sin)]
    theirs = keep_latents(*given, expected, expected[..., :rank], slots.cpu(), pairs)
    out = theirs.to(DEVICE).index_fill(2, torch.arange(rank, rank + turned, device=DEVICE), float("nan"))
    kernels.keep_latents(query[..., plain:], out, latent, shared, cos, sin, cache, slots, pairs)
    assert torch.equal(out.cpu(), theirs)
    assert torch.equal(cache[1:].cpu().float(), expected[1:].float())
    assert (cache[0].float() == 2.0).all(), "a row to be dropped was written"


def test_attention_to_latents_is_attention_to_the_keys_and_values_made_of_them():
    """The products of the latent may be applied to queries and results instead."""
    (num_heads, plain, turned, _), rank = SIZES["deep"], 24
    query, _, shared, cos, sin = (part.cpu() for part in inputs(SIZES["deep"], torch.float32))
    latent, weight = (drawn(*shape, seed=seed).cpu() for shape, seed in (((5, rank), 3), ((num_heads, 32, rank), 4)))
    slots, placed = torch.arange(4, 9), (cos, sin)
    segments = torch.tensor([[1, 2]]), torch.tensor([0]), None, None, 0.3
    keys, values = (part.cpu() for part in caches(SIZES["deep"], torch.float32))
    made = torch.einsum("hdr,tr->thd", weight, latent)
    by_head = store_latents(query, made, shared, *placed, keys, values, slots, Pairs.TO_HALVES)
    expected = tree_attention(by_head[None], keys.nan_to_num(0.0), values.nan_to_num(0.0), *segments)
    cache = torch.zeros(5, BLOCK_SIZE, 1, rank + turned)
    absorbed = keep_latents(
        query, weight[:, :plain], latent, shared, *placed, cache, cache[..., :rank], slots, Pairs.TO_HALVES
    )
    found = tree_attention(absorbed[None], cache, cache[..., :rank], *segments)
    torch.testing.assert_close(torch.einsum("bthr,hdr->bthd", found, weight[:, plain:]), expected)


@pytest.mark.parametrize("pairs", [Pairs.HALVES, Pairs.TO_HALVES])
def test_the_reference_rotates_as_transformers_does(pairs):
    query, made, shared, cos, sin = (part.cpu() for part in inputs(SIZES["deep"], torch.float32))
    rotate = apply_rotary_pos_emb_interleave if pairs is Pairs.TO_HALVES else apply_rotary_pos_emb
    parts = query[None, :, :, 16:].transpose(1, 2), shared[None, None]
    query_turned, key_turned = rotate(*parts, cos[None], sin[None])
    found = [part.cpu() for part in caches(SIZES["deep"], torch.float32)]
    out = store_latents(query, made, shared, cos, sin, *found, torch.arange(4, 9), pairs)
    keys, values = (part.flatten(0, 1)[4:9] for part in found)
    torch.testing.assert_close(out[..., 16:], query_turned[0].transpose(0, 1))
    torch.testing.assert_close(keys[..., 16:], key_turned[0, 0][:, None].expand(-1, 3, -1))
    assert torch.equal(out[..., :16], query[..., :16])
    assert torch.equal(keys[..., :16], made[..., :16])
    assert torch.equal(values, made[..., 16:])
