"""Steps of a mixture of experts: the kernels against the references, and these against row by row."""

import pytest
import torch

from tests.kernels.drawn import draw
from wingbeat.kernels.experts.product import Gate, Routes, Shared, grouped_product, sum_choices
from wingbeat.kernels.experts.router import Rule, choose

pytestmark = [pytest.mark.few(5), pytest.mark.usefixtures("poisoned_memory")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2}
"""Triton's interpreter multiplies no matrices of bfloat16."""
GATES = {"plain": None, "gated": Gate(), "interleaved": Gate(True, 1.702, 0.5, 1.0)}
RULES = {
    "softmax": Rule(4, normalised=False),
    "top softmax": Rule(4),
    "sigmoid": Rule(3, sigmoid=True, least=1e-20, scale=2.5),
    "rounded": Rule(2, dtype=torch.bfloat16),
    "biased softmax": Rule(2),
    "best groups": Rule(3, sigmoid=True, least=1e-20, num_groups=4, kept_groups=2, group_best=2),
    "best group": Rule(2, normalised=False, num_groups=4),
}


@pytest.fixture
def kernels():
    return pytest.importorskip("wingbeat.kernels.experts.triton")


def there(given):
    return given.to(DEVICE) if isinstance(given, torch.Tensor) else given


def drawn_choices(num_rows, num_experts, choices):
    """Experts of rows; those of a row differ."""
    picked = torch.randint(num_experts, (num_rows, 1), generator=torch.Generator().manual_seed(4))
    return (picked + torch.arange(choices)) % num_experts


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("transposed", [False, True], ids=["by output", "by input"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 8), (5, 3), (150, 4), (64, 1)])
def test_groups_are_multiplied_as_row_by_row(kernels, num_rows, num_experts, gate, transposed, biased, dtype):
    """Some experts have no row; columns and inputs fill no tile; the first choices are of the same expert."""
    choices, gate = min(2, num_experts), GATES[gate]
    rows, weight = draw(num_rows, 70, dtype=dtype, seed=1), draw(num_experts, 90, 70, dtype=dtype, seed=2) / 8
    bias = draw(num_experts, 90, dtype=dtype, seed=3) if biased else None
    chosen = drawn_choices(num_rows, num_experts, choices)
    routes = Routes.of(chosen, num_experts)
    each = [(row, int(one)) for row in range(num_rows) for one in chosen[row]]
    expected = torch.stack([rows[row].double() @ weight[one].double().t() for row, one in each])
    if bias is not None:
        expected += bias[chosen.flatten()].double()
    if gate is not None:
        expected = gate.apply(expected)
    by_reference = grouped_product(rows, weight, bias, routes, gate)
    laid = weight.mT.contiguous().mT if transposed else weight
    out = torch.empty(num_rows * choices, expected.shape[1], dtype=dtype, device=DEVICE)
    kernels.grouped_product(there(rows), there(laid), there(bias), out, Routes(*map(there, routes)), gate)
    for found in (by_reference, out.cpu()):
        torch.testing.assert_close(found.double(), expected, rtol=LIMITS[dtype], atol=LIMITS[dtype])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_rows", "num_experts"), [(3, 8), (40, 100)])
def test_experts_are_chosen_as_by_the_reference(kernels, num_rows, num_experts, rule):
    """Some experts are alike; a row of NaN has experts, too."""
    logits = (draw(num_rows, num_experts, dtype=torch.float32, seed=5) * 4).bfloat16()
    bias = draw(num_experts, dtype=torch.float32, seed=6) if RULES[rule].sigmoid or "biased" in rule else None
    expected = choose(logits, bias, RULES[rule])
    found = kernels.choose(there(logits), there(bias), RULES[rule], None)
    assert torch.equal(found[1].cpu(), expected[1])
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-2 if rule == "rounded" else 1e-5, atol=1e-6)
    nans = kernels.choose(there(torch.full_like(logits, float("nan"))), there(bias), RULES[rule], None)[1]
    assert ((nans >= 0) & (nans < num_experts)).all()


@pytest.mark.parametrize("weighted", [False, True], ids=["whole", "weighted"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_shared_expert_is_added_to_those_of_each_row(kernels, count, weighted):
    """Its parts are experts with ids of their own; columns of a part fill no tile."""
    size, num_experts, inputs = 40, 4, 70
    rows, logits = draw(9, inputs, dtype=torch.float32, seed=0), draw(9, num_experts, dtype=torch.float32, seed=1)
    shared_logits = draw(9, 1, dtype=torch.float32, seed=2) if weighted else None
    gate_up = draw(num_experts, 2 * size, inputs, dtype=torch.float32, seed=3) / 8
    down = draw(num_experts, inputs, size, dtype=torch.float32, seed=4) / 8
    gate, up = (draw(count * size, inputs, dtype=torch.float32, seed=seed) / 8 for seed in (5, 6))
    back, rule = draw(inputs, count * size, dtype=torch.float32, seed=7) / 8, Rule(2, num_shared=count)
    weights, chosen = choose(logits, None, rule, shared_logits)
    alone, routes = Routes.of(chosen[:, :2], num_experts), Routes.of(chosen, num_experts + count)
    each = grouped_product(grouped_product(rows, gate_up, None, alone, Gate()), down, None, alone)
    by_shared = (torch.nn.functional.silu(rows @ gate.t()) * (rows @ up.t())) @ back.t()
    expected = sum_choices(each, weights[:, :2]) + (1 if shared_logits is None else shared_logits.sigmoid()) * by_shared
    before, behind = Shared(count, (gate, up)), Shared(count, (back,))
    each = grouped_product(
        grouped_product(rows, gate_up, None, routes, Gate(), before), down, None, routes, None, behind
    )
    torch.testing.assert_close(sum_choices(each, weights), expected, rtol=1e-4, atol=1e-4)

    weights, chosen = kernels.choose(there(logits), None, rule, there(shared_logits))
    order, blocks = kernels.routes(chosen.flatten(), num_experts + count, routes.blocks.shape[1], routes.height)
    moved, made = routes._replace(order=order, blocks=blocks), weights.new_empty(len(order), size)
    before, behind = (one._replace(weights=tuple(map(there, one.weights))) for one in (before, behind))
    kernels.grouped_product(there(rows), there(gate_up), None, made, moved, Gate(), before)
    each = weights.new_empty(len(order), inputs)
    kernels.grouped_product(made, there(down), None, each, moved, None, behind)
    torch.testing.assert_close(kernels.sum_choices(each, weights).cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 8), (7, 3), (300, 100), (700, 2)])
def test_pairs_are_placed_as_by_the_reference(kernels, num_rows, num_experts):
    chosen = drawn_choices(num_rows, num_experts, 2)
    expected = Routes.of(chosen, num_experts)
    order, blocks = kernels.routes(there(chosen.flatten()), num_experts, expected.blocks.shape[1], expected.height)
    assert torch.equal(order.cpu(), expected.order)
    used = expected.blocks[0] >= 0
    assert torch.equal(blocks[0].cpu(), expected.blocks[0])
    assert torch.equal(blocks.cpu()[:, used], expected.blocks[:, used])


@pytest.mark.parametrize("gate", GATES)
def test_bits_of_a_row_are_those_of_the_row_alone(kernels, gate):
    """Experts of a row alone, and among 3, 16, 64 and 300 rows, whose blocks are twice as high."""
    rows, gated, bias = (
        draw(300, 128, dtype=torch.float16, seed=0),
        draw(4, 96, 128, dtype=torch.float16, seed=1) / 8,
        None,
    )
    down = draw(4, 70, 96 if GATES[gate] is None else 48, dtype=torch.float16, seed=2) / 8
    chosen, weights = drawn_choices(300, 4, 2), draw(300, 2, dtype=torch.float32, seed=3)

    def computed(count: int) -> torch.Tensor:
        order, blocks, *rest = Routes.of(chosen[:count], 4)
        order, blocks = kernels.routes(there(chosen[:count].flatten()), 4, blocks.shape[1], rest[0])
        routes = Routes(order, blocks, *rest)
        made = torch.empty(2 * count, down.shape[2], dtype=rows.dtype, device=DEVICE)
        kernels.grouped_product(there(rows[:count]), there(gated), bias, made, routes, GATES[gate])
        each = torch.empty(2 * count, 70, dtype=rows.dtype, device=DEVICE)
        kernels.grouped_product(made, there(down), bias, each, routes)
        return kernels.sum_choices(each, there(weights[:count])).cpu()

    alone = computed(1)
    for count in (3, 16, 64, 300):
        assert torch.equal(computed(count)[:1], alone)
    expected = sum_choices(
        grouped_product(
            grouped_product(rows[:1], gated, bias, Routes.of(chosen[:1], 4), GATES[gate]),
            down,
            bias,
            Routes.of(chosen[:1], 4),
        ),
        weights[:1],
    )
    torch.testing.assert_close(alone, expected, rtol=2e-2, atol=2e-2)
