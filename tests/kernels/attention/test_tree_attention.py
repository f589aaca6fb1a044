"""The front of tree attention: the torch reference is the softmax formula, and misfits are refused by name."""

import pytest
import torch

from tests.kernels.attention_cases import (
    CAUSAL,
    DEVICE,
    SHORT,
    TREES,
    Case,
    assert_close,
    build,
    by_formula,
    moved_before_the_beginning,
)
from wingbeat.kernels.attention.reference import tree_attention

pytestmark = pytest.mark.few(6)


@pytest.mark.parametrize("case", TREES + CAUSAL, ids=str)
def test_reference_is_the_formula(case):
    """Unwritten memory of the pool holds large finite numbers, so that any leak through the mask is visible."""
    if DEVICE != "cpu":
        pytest.skip("the front runs the kernel here")
    inputs = build(case, poison=448.0 if case.fp8 else 1e4)
    assert_close(tree_attention(*inputs.arguments, **inputs.options), by_formula(inputs))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_rows_before_the_beginning_are_nobodys_keys(case, count):
    if DEVICE != "cpu":
        pytest.skip("the front runs the kernel here")
    inputs = build(case, poison=1e4)
    moved = moved_before_the_beginning(inputs, count)
    out = tree_attention(*moved.arguments, **moved.options)
    assert_close(out[:, count:], by_formula(inputs))
    assert out.isfinite().all()


REFUSED = {
    "query": {0: lambda query: query.double()},
    "do not fit": {1: lambda cache: cache[..., :8]},
    "caches are": {2: lambda cache: cache.half()},
    "block_tables": {3: lambda tables: tables.int()},
    "num_context": {4: lambda contexts: contexts[:1]},
    "positions": {5: lambda positions: positions[:, :2]},
    "mask_words": {6: lambda words: words[:, :2]},
    "scaling -1": {7: lambda scaling: -1.0},
    "sliding_window 0": {"sliding_window": 0},
    "softcap -2": {"softcap": -2.0},
    "sinks": {"sinks": torch.zeros(3, device=DEVICE)},
    "out": {"out": torch.zeros(2, 3, 4, 15, device=DEVICE)},
}


@pytest.mark.parametrize("named", REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(named):
    inputs = build(Case((5, 9), 3), poison=0.0)
    for place, change in REFUSED[named].items():
        if isinstance(place, int):
            inputs.arguments[place] = change(inputs.arguments[place])
        else:
            inputs.options[place] = change
    with pytest.raises(ValueError, match=named):
        tree_attention(*inputs.arguments, **inputs.options)


def test_fp8_caches_are_widened_as_they_are():
    inputs = build(Case((5, 9), 3, fp8=True), poison=0.0)
    query, key_cache, value_cache, *rest = inputs.arguments
    found = tree_attention(query, key_cache, value_cache, *rest, **inputs.options)
    wide = tree_attention(query, key_cache.to(query.dtype), value_cache.to(query.dtype), *rest, **inputs.options)
    torch.testing.assert_close(found, wide)
