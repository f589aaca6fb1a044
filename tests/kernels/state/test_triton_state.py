"""The delta rule's kernel against its reference, at odd sizes and in memory that held NaN."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.state.test_state_reference import trees
from wingbeat.kernels.state import triton as triton_state
from wingbeat.kernels.state.reference import delta_rule
from wingbeat.kernels.state.rows import TreeRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [pytest.mark.few(2), pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(
    ("num_reqs", "num_nodes", "key_dim", "value_dim"), [(2, 7, 12, 41), (1, 1, 16, 16), (3, 17, 20, 5)]
)
def test_the_delta_rule_is_its_reference(num_reqs, num_nodes, key_dim, value_dim, normed):
    draw = torch.Generator().manual_seed(num_nodes)

    def numbers(*shape):
        return torch.randn(num_reqs, num_nodes, *shape, generator=draw)

    rows = TreeRows.of(torch.arange(num_reqs).flip(0), trees(num_reqs, num_nodes), num_nodes - 1, 1)
    # As transformers cuts them out of one convolution: not one behind the other in memory.
    query, key = numbers(2, 2 * key_dim)[..., :key_dim], 0.3 * numbers(2, 2 * key_dim)[..., key_dim:]
    value, decay, beta = numbers(4, value_dim), -numbers(4).abs(), numbers(4).sigmoid()
    states = torch.randn(num_reqs + 1, 4, key_dim, value_dim, generator=draw)
    epsilon = 1e-6 if normed else None
    given = (query, key, value, decay, beta, states)
    out, added = delta_rule(*given, rows, epsilon)
    on_device = [part.to(DEVICE) for part in given]
    own, own_added = triton_state.delta_rule(*on_device, TreeRows(*(part.to(DEVICE) for part in rows)), epsilon)
    for ours, expected in zip((own, *own_added), (out, *added), strict=True):
        torch.testing.assert_close(ours.cpu(), expected, atol=2e-5, rtol=2e-5)
