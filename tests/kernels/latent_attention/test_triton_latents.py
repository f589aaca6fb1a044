"""The step of attention over latents: the kernel against its reference, and this against transformers."""

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from tests.kernels.drawn import draw
from wingbeat.kernels.latent_attention.reference import store_latents

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 4
SIZES = {"deep": (3, 16, 8, 16), "odd": (5, 12, 6, 20)}
"""Heads, plain and rotated elements of keys, and elements of values."""


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
@pytest.mark.parametrize("in_pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("size", SIZES)
def test_rows_go_where_the_reference_puts_them(size, in_pairs, dtype):
    kernels = pytest.importorskip("wingbeat.kernels.latent_attention.triton")
    given, slots = inputs(SIZES[size], dtype), torch.tensor([1, 7, 4, 3, 15], device=DEVICE)  # two are dropped
    found, expected = caches(SIZES[size], dtype), [part.cpu() for part in caches(SIZES[size], dtype)]
    query = kernels.store_latents(*given, *found, slots, in_pairs)
    theirs = store_latents(*(part.cpu() for part in given), *expected, slots.cpu(), in_pairs)
    assert torch.equal(query.cpu(), theirs)
    for ours, their in zip(found, expected, strict=True):
        assert ours[0].isnan().all(), "a row to be dropped was written"
        assert torch.equal(ours[1:].cpu().nan_to_num(9.0), their[1:].nan_to_num(9.0))


@pytest.mark.parametrize("in_pairs", [False, True], ids=["halves", "pairs"])
def test_the_reference_rotates_as_transformers_does(in_pairs):
    query, made, shared, cos, sin = (part.cpu() for part in inputs(SIZES["deep"], torch.float32))
    rotate = apply_rotary_pos_emb_interleave if in_pairs else apply_rotary_pos_emb
    parts = query[None, :, :, 16:].transpose(1, 2), shared[None, None]
    query_turned, key_turned = rotate(*parts, cos[None], sin[None])
    found = [part.cpu() for part in caches(SIZES["deep"], torch.float32)]
    out = store_latents(query, made, shared, cos, sin, *found, torch.arange(4, 9), in_pairs)
    keys, values = (part.flatten(0, 1)[4:9] for part in found)
    torch.testing.assert_close(out[..., 16:], query_turned[0].transpose(0, 1))
    torch.testing.assert_close(keys[..., 16:], key_turned[0, 0][:, None].expand(-1, 3, -1))
    assert torch.equal(out[..., :16], query[..., :16])
    assert torch.equal(keys[..., :16], made[..., :16])
    assert torch.equal(values, made[..., 16:])
