"""Steps of a decoder layer: the Triton kernels against the torch reference, and that against transformers' modules."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from wingbeat.kernels.layer import reference
from wingbeat.kernels.layer.reference import Turn

pytestmark = pytest.mark.few(6)

kernels = pytest.importorskip("wingbeat.kernels.gpu.layer")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK_SIZE = 4
TOO_WIDE = kernels.MOST_HIDDEN + 1
ULPS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 4e-2}
"""A few roundings of a value near 2, which the order of a sum may turn the other way."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).to(dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    limit = ULPS[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Every bit; Triton's interpreter cuts a bfloat16 off where hardware rounds it."""
    if ours.dtype == torch.bfloat16 and DEVICE == "cpu":
        close(ours, theirs)
    else:
        assert torch.equal(ours, theirs)


def angles(num_tokens: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    turned = draw(num_tokens, dim // 2, seed=9).repeat(1, 2)
    return turned.cos().to(dtype), turned.sin().to(dtype)


def caches(num_kv_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every element is NaN."""
    return [torch.full((4, BLOCK_SIZE, num_kv_heads, dim), float("nan"), device=DEVICE).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 24, 64, 1030])
@pytest.mark.parametrize("added", [False, True], ids=["alone", "sum"])
def test_a_norm_of_a_sum_is_the_references(size, added, dtype, poisoned_memory):
    hidden, weight = draw(3, size, dtype=dtype), draw(size, dtype=dtype, seed=2) + 1
    residual = draw(3, size, dtype=dtype, seed=1) if added else None
    ours = kernels.add_rms_norm(hidden, residual, weight, 1e-5)
    theirs = reference.add_rms_norm(hidden.cpu(), None if residual is None else residual.cpu(), weight.cpu(), 1e-5)
    close(ours[0].cpu(), theirs[0])
    same(ours[1].cpu(), theirs[1])
    assert added or ours[1] is hidden


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_added_and_parts_of_rows_are_normalised(dtype, poisoned_memory):
    hidden, residual, weight = (draw(*size, dtype=dtype, seed=len(size)) for size in ((3, 40), (3, 40), (24,)))
    part, whole = hidden[:, 5:29], hidden.cpu().clone()
    theirs = reference.add_rms_norm(part.cpu(), None, weight.cpu(), 1e-5)[0]
    close(kernels.add_rms_norm(part, None, weight, 1e-5)[0].cpu(), theirs)
    kernels.norm_parts(hidden, (weight[:9], weight), 1e-5)
    reference.norm_parts(whole, (weight[:9].cpu(), weight.cpu()), 1e-5)
    close(hidden.cpu(), whole)
    rows, others = part.contiguous(), residual[:, :24].contiguous()
    for then in (None, weight * 2):
        theirs = reference.add_norm(rows.cpu(), others.cpu(), weight.cpu(), 1e-5, None if then is None else then.cpu())
        for mine, its in zip(kernels.add_norm(rows, others, weight, 1e-5, then), theirs, strict=True):
            close(mine.cpu(), its)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_gemma_round_once(dtype, poisoned_memory):
    """Their weights, one more than the checkpoint's, are float32 beside rows of any dtype."""
    norm, hidden = Gemma3RMSNorm(64, 1e-6), draw(5, 64, dtype=dtype)
    norm.weight.data.copy_(draw(64, seed=2))
    wide, expected = norm.weight.data.to(DEVICE) + 1, norm(hidden.cpu())
    close(kernels.add_rms_norm(hidden, None, wide, norm.eps)[0].cpu(), expected)
    close(reference.add_rms_norm(hidden.cpu(), None, wide.cpu(), norm.eps)[0], expected)
    found, slots = caches(1, 64, dtype), torch.arange(4, 9, device=DEVICE)
    straight = torch.ones(5, 64, device=DEVICE).to(dtype), torch.zeros(5, 64, device=DEVICE).to(dtype)
    qkv = hidden[:, None].repeat(1, 3, 1)
    query = kernels.rotate_and_store(qkv, *straight, *found, slots, wide, wide, norm.eps)
    close(query[:, 0].cpu(), expected)
    close(found[0].flatten(0, 1)[4:9, 0].cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_norms_as_transformers_does(dtype):
    norm = LlamaRMSNorm(24, eps=1e-5).to(dtype)
    norm.weight.data = draw(24, dtype=dtype).cpu()
    hidden, residual = draw(5, 24, dtype=dtype, seed=1).cpu(), draw(5, 24, dtype=dtype, seed=2).cpu()
    normed, total = reference.add_rms_norm(hidden, residual, norm.weight, 1e-5)
    assert torch.equal(total, residual + hidden)
    close(normed, norm(total))


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 2, 16), (3, 1, 24), (40, 8, 64)], ids=str)
def test_queries_keys_and_values_go_where_the_references_go(num_heads, num_kv_heads, dim, normed, dtype):
    num_tokens = 5
    qkv = draw(num_tokens, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    norms = (draw(dim, dtype=dtype, seed=3), draw(dim, dtype=dtype, seed=4), 1e-6) if normed else (None, None, 0.0)
    slots = torch.tensor([1, 7, 4, 3, 15], device=DEVICE)  # of which two are dropped
    found, expected = caches(num_kv_heads, dim, dtype), [part.cpu() for part in caches(num_kv_heads, dim, dtype)]
    turned = angles(num_tokens, dim, dtype)
    query = kernels.rotate_and_store(qkv, *turned, *found, slots, *norms)
    on_host = [part.cpu() if isinstance(part, torch.Tensor) else part for part in (*turned, *expected, slots, *norms)]
    theirs = reference.rotate_and_store(qkv.cpu(), *on_host)
    close(query.cpu(), theirs)
    for ours, their in zip(found, expected, strict=True):
        rows = ours.cpu().flatten(0, 1)
        assert rows[:BLOCK_SIZE].isnan().all(), "a row to be dropped was written"
        assert torch.equal(rows[BLOCK_SIZE:].isnan(), their.flatten(0, 1)[BLOCK_SIZE:].isnan())
        written = slots.cpu()[slots.cpu() >= BLOCK_SIZE]
        close(rows[written], their.flatten(0, 1)[written])
    if not normed:
        same(query.cpu(), theirs)


TURNS = {
    "part": (Turn(), 8),
    "one half": (Turn(one_half=True), 12),
    "pairs": (Turn(in_pairs=True), 24),
    "part in pairs": (Turn(in_pairs=True), 12),
    "nothing": (Turn(), 0),
    "norm last": (Turn(norm_last=True), 16),
    "repeated": (Turn(in_pairs=True, repeated=True), 24),
}
"""Elements of heads of 24 that are rotated together, and widths of the cosines."""


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", TURNS)
def test_queries_keys_and_values_of_other_rotations_are_the_references(kind, dtype):
    turn, width = TURNS[kind]
    qkv, slots = draw(5, 6, 24, dtype=dtype), torch.arange(4, 9, device=DEVICE)
    norms = (draw(24, dtype=dtype, seed=3), draw(24, dtype=dtype, seed=4), 1e-6)
    turned = [part[:, :width].contiguous() for part in angles(5, 2 * width if turn.one_half else width, dtype)]
    found, expected = caches(1, 24, dtype), [part.cpu() for part in caches(1, 24, dtype)]
    query = kernels.rotate_and_store(qkv, *turned, *found, slots, *norms, turn)
    on_host = [part.cpu() if isinstance(part, torch.Tensor) else part for part in (*turned, *expected, slots, *norms)]
    close(query.cpu(), reference.rotate_and_store(qkv.cpu(), *on_host, turn))
    for ours, theirs in zip(found, expected, strict=True):
        close(ours.cpu().flatten(0, 1)[4:9], theirs.flatten(0, 1)[4:9])


def test_more_pairs_than_a_head_has_are_refused():
    cos, slots = draw(1, 24, dtype=torch.float32), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"24 pairs are rotated by cos \(1, 24\) in heads of 24 elements"):
        kernels.rotate_and_store(
            draw(1, 6, 24), cos, cos, *caches(1, 24, torch.float32), slots, None, None, 0.0, Turn(one_half=True)
        )


@pytest.mark.parametrize("size", [48, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_are_normed_beside_features_as_by_the_reference(size, dtype, poisoned_memory):
    table, features = draw(9, size, dtype=dtype), draw(5, size, dtype=dtype, seed=1) * 3
    weights = draw(size, dtype=dtype, seed=2), draw(size, dtype=dtype, seed=3)
    ids = torch.tensor([8, 0, 3, 3, 1], device=DEVICE)
    expected = reference.embed_beside(ids.cpu(), table.cpu(), features.cpu(), tuple(w.cpu() for w in weights), 1e-5)
    for ours, theirs in zip(kernels.embed_beside(ids, table, features, weights, 1e-5), expected, strict=True):
        close(ours.cpu(), theirs)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embeddings_are_normed_beside_the_features_of_parents(dtype, normed, poisoned_memory):
    table, features = draw(9, 48, dtype=dtype), draw(2, 4, 48, dtype=dtype, seed=1) * 3
    weights = draw(48, dtype=dtype, seed=2), draw(48, dtype=dtype, seed=3)
    ids, parents = torch.tensor([8, 0, 3, 3, 1, 7], device=DEVICE), torch.tensor([[3, 0, 3], [1, 1, 2]], device=DEVICE)
    given = ids, table, features, weights, 1e-5, parents, normed
    on_host = (
        tuple(part.cpu() for part in each) if isinstance(each, tuple) else each.cpu() if torch.is_tensor(each) else each
        for each in given
    )
    for ours, theirs in zip(kernels.embed_beside(*given), reference.embed_beside(*on_host), strict=True):
        close(ours.cpu(), theirs)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_angles_are_the_references(halves, dtype, poisoned_memory):
    """As far as the longest contexts, where an argument of thousands of turns has to be brought down exactly."""
    positions = torch.tensor([[0, 1, 77], [4095, 131_071, 1_048_575]], device=DEVICE)
    frequencies = 500_000.0 ** -torch.arange(0, 1, 1 / 24, device=DEVICE)
    signed = torch.cat([-frequencies, frequencies]) if halves == 1 else frequencies
    expected = reference.rotations(positions.cpu(), signed.cpu(), 1.1, dtype, halves)
    for ours, theirs in zip(kernels.rotations(positions, signed, 1.1, dtype, halves), expected, strict=True):
        close(ours.cpu(), theirs)


def test_keys_and_values_of_an_fp8_cache_are_saturated():
    """Numbers that e4m3 has: Triton's interpreter rounds others wrongly."""
    fp8 = torch.float8_e4m3fn
    qkv = (torch.arange(2 * 4 * 16).view(2, 4, 16) % 7 - 3.0).to(DEVICE, torch.bfloat16)
    qkv[0, 2:, 3], qkv[1, 2:, 12] = 3e4, -500.0
    straight = [torch.full((2, 16), at, dtype=torch.bfloat16, device=DEVICE) for at in (1.0, 0.0)]
    slots = torch.tensor([7, 4], device=DEVICE)
    for steps in (kernels, reference):
        found = caches(1, 16, fp8)
        norms = (None, None, 0.0)
        steps.rotate_and_store(qkv, *straight, *found, slots, *norms)
        for part, cache in zip((qkv[:, 2:3], qkv[:, 3:4]), found, strict=True):
            assert torch.equal(cache.float().flatten(0, 1)[slots], part.float().clamp(-448, 448))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_the_reference_rotates_as_transformers_does(normed, dtype):
    heads, kv_heads, dim = 4, 2, 16
    qkv = draw(5, heads + 2 * kv_heads, dim, dtype=dtype).cpu()
    cos, sin = (part.cpu() for part in angles(5, dim, dtype))
    norm = Qwen3RMSNorm(dim, eps=1e-6).to(dtype)
    norm.weight.data = draw(dim, dtype=dtype, seed=3).cpu()
    found = [part.cpu() for part in caches(kv_heads, dim, dtype)]
    slots = torch.arange(5) + BLOCK_SIZE
    weights = (norm.weight, norm.weight, 1e-6) if normed else ()
    query = reference.rotate_and_store(qkv, cos, sin, *found, slots, *weights)
    q, k, v = (part.transpose(0, 1)[None] for part in qkv.split([heads, kv_heads, kv_heads], dim=1))
    if normed:
        q, k = norm(q), norm(k)
    q, k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    close(query, q[0].transpose(0, 1).contiguous())
    close(found[0].flatten(0, 1)[slots], k[0].transpose(0, 1).contiguous())
    assert torch.equal(found[1].flatten(0, 1)[slots], v[0].transpose(0, 1))


def test_the_first_half_of_a_sine_may_carry_a_sign():
    qkv, slots = draw(5, 6, 16), torch.arange(5, device=DEVICE) + BLOCK_SIZE
    cos, sin = angles(5, 16, torch.float32)
    signed = torch.cat([-sin[:, :8], sin[:, 8:]], dim=1)
    outcomes = [
        kernels.rotate_and_store(qkv, cos, s, *caches(2, 16, qkv.dtype), slots, None, None, 0.0) for s in (sin, signed)
    ]
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 24, 1030])
def test_gated_activation_is_the_references_and_transformers(size, dtype, poisoned_memory):
    gate_up = 4 * draw(3, 2 * size, dtype=dtype)
    expected = reference.silu_mul(gate_up.cpu())
    close(kernels.silu_mul(gate_up).cpu(), expected)
    mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=size))
    gate, up = gate_up.cpu().chunk(2, dim=-1)
    assert torch.equal(mlp.act_fn(gate) * up, expected)
    assert Qwen3Config().hidden_act == "silu"


@pytest.mark.parametrize(
    ("num_groups", "weighted", "gate_first"),
    [(3, True, True), (1, True, False), (1, False, True)],
    ids=["behind-the-gate", "before-the-gate", "gate-alone"],
)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
def test_a_gated_norm_is_the_references(num_groups, weighted, gate_first, dtypes, poisoned_memory):
    size = 37 if weighted else 1030
    values = draw(2, 5, 4, num_groups * size, dtype=dtypes[0])
    gate = draw(2, 5, 4, num_groups * size + 6, dtype=dtypes[1], seed=1)[..., 6:]
    weight = draw(num_groups * size, dtype=dtypes[1], seed=2) if weighted else None
    shape = 1e-5, size, gate_first, 0.7
    expected = reference.gated_norm(values.cpu(), gate.cpu(), None if weight is None else weight.cpu(), *shape)
    close(kernels.gated_norm(values, gate, weight, *shape).cpu(), expected)


def test_no_rows_are_no_launch():
    weight, slots = draw(8), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert kernels.add_rms_norm(draw(0, 8), None, weight, 1e-5)[0].shape == (0, 8)
    assert kernels.silu_mul(draw(0, 8)).shape == (0, 4)
    empty = draw(0, 8)
    query = kernels.rotate_and_store(draw(0, 6, 8), empty, empty, *caches(2, 8, weight.dtype), slots, None, None, 0.0)
    assert query.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: kernels.add_rms_norm(draw(8, 3).T, None, draw(8), 1e-5), "hidden"),
        (lambda: kernels.add_rms_norm(draw(3, 8), draw(2, 8), draw(8), 1e-5), "residual"),
        (
            lambda: kernels.add_rms_norm(draw(1, kernels.MOST_HIDDEN + 1), None, draw(kernels.MOST_HIDDEN + 1), 1e-5),
            "rows",
        ),
        (lambda: kernels.silu_mul(draw(8, 3).T), "gate_up"),
        (
            lambda: kernels.rotate_and_store(
                draw(5, 6, 8), draw(5, 8), draw(5, 4), *caches(2, 8, torch.float32), torch.arange(5), None, None, 0.0
            ),
            "sin",
        ),
        (
            lambda: kernels.rotate_and_store(
                draw(5, 6, 8), draw(5, 8), draw(5, 8), *caches(2, 8, torch.float16), torch.arange(5), None, None, 0.0
            ),
            "key_cache",
        ),
    ],
    ids=["strides", "residual", "rows", "gate-up", "sine", "cache"],
)
def test_what_a_kernel_would_misread_is_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()
