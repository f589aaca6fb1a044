"""Deterministic mode on a GPU, counted on a fake GPU: as many launches as without the mode, and rounds are captured."""

import pytest
from torch import nn

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, place, why_not
from tests.runtime.gpu_world import CHAIN, TREE, llama, new_model
from tests.runtime.launch_counts import LIMITS, captured
from wingbeat.runtime.alike.linears import AlikeLinear
from wingbeat.runtime.fused.layers import OPS, fuse
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.round.choice import Choosing
from wingbeat.runtime.verifier.layers.linears import widen_logits
from wingbeat.runtime.verifier.loading.loader import LoadedModel, prepare_model


def alike_verifier(num_layers: int) -> LoadedModel:
    """Like `gpu_world.placed_verifier`, in deterministic mode."""
    model = new_model(llama(num_layers))
    loaded = prepare_model(model, "fake")
    for linear in model.modules():
        if isinstance(linear, nn.Linear):
            linear.__class__ = AlikeLinear
            linear.repack()
    fuse(model, loaded.decoder_layers, loaded.layers, OPS["cuda"])
    place(model)
    for linear in model.modules():
        if isinstance(linear, AlikeLinear):
            linear.repack()
    assert widen_logits(model)
    loaded.deterministic = True
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("chain", CHAIN), ("tree", TREE)])
def test_rounds_launch_no_more_and_are_captured(name, shape):
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with fake_gpu() as gpu:
        one, two = (captured(gpu, shape, alike_verifier(count)) for count in (1, 2))
    layer = {two[key] - one[key] for key in one}
    assert layer == {LIMITS["layer"]}
    for stage, what in ((Stage.BASE_DECODING, "decoding"), (Stage.BASE_VERIFICATION, f"verification of a {name}")):
        beside = one[stage, Choosing.GREEDY] - LIMITS["layer"]
        assert beside == LIMITS[f"{what} beside its layers, greedy"]
