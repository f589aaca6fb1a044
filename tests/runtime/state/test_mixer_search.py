"""Layers with state at load: what a mixer is found to be, and that one which is run wrongly is never served."""

from types import SimpleNamespace

import pytest
import torch

from tests.runtime.hybrids import hybrid, needs_states, random_hybrid
from wingbeat.kernels.state.rows import TreeRows
from wingbeat.runtime.state.mixer import Mixer
from wingbeat.runtime.state.pool import StatePool
from wingbeat.runtime.state.tree_mixer import TreeMixer
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

pytestmark = needs_states


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "layers", "heads", "num_entries"),
    [
        ("lfm2", [0, 2], [0, 4, 0, 4], 1),
        ("qwen3_next", [0, 2], [0, 4, 0, 4], 2),
        ("falcon_h1", [0, 1, 2, 3], [4, 4, 4, 4], 0),
        ("nemotron_h", [0, 3], [0, 0, 4, 0], 1),
    ],
)
def test_what_is_learned(name, layers, heads, num_entries):
    loaded = hybrid(name).loaded
    mixers = loaded.parts["states"].mixers
    assert [mixer.state.layer for mixer in mixers] == layers
    assert [layer.num_heads for layer in loaded.layers] == heads
    assert all(isinstance(mixer, TreeMixer) for mixer in mixers)
    assert all(len(mixer._entries) == num_entries and mixer._exit is not None for mixer in mixers)


def forget_path(monkeypatch):
    for kind in (Mixer, TreeMixer):
        monkeypatch.setattr(kind, "advance", lambda *args: None)


def forget_the_child(monkeypatch):
    def short(advance):
        def of_the_root(mixer, pool, kept, accepted, path):
            accepted = accepted._replace(num_tokens=torch.ones_like(accepted.num_tokens))
            advance(mixer, pool, kept, accepted, accepted.path())

        return of_the_root

    for kind in (Mixer, TreeMixer):
        monkeypatch.setattr(kind, "advance", short(kind.advance))


def forget_all(monkeypatch):
    monkeypatch.setattr(StatePool, "store", lambda *args: None)


def share_a_row(monkeypatch):
    gather, of = StatePool.gather, TreeRows.of
    monkeypatch.setattr(StatePool, "gather", lambda self, layer, rows: gather(self, layer, torch.zeros_like(rows)))
    monkeypatch.setattr(TreeRows, "of", lambda slots, *rest: of(torch.zeros_like(slots), *rest))


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (forget_path, "in plain decoding"),
        (forget_the_child, "behind an accepted path"),
        (forget_all, "after a prompt in chunks|in plain decoding"),
        (share_a_row, "differ"),
    ],
)
def test_states_that_do_not_follow_their_sequence_are_noticed_at_load(monkeypatch, wrong, where):
    wrong(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=f"Lfm2.*({where})"):
        prepare_model(random_hybrid("lfm2"), "x")


def test_state_that_mixers_of_another_kind_keep_is_refused(monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.state.mixer_search.CACHE_ARGUMENTS", ())
    with pytest.raises(UnsupportedModelError, match=r"Lfm2.*layers \[0, 2\] keep recurrent or convolution state"):
        prepare_model(random_hybrid("lfm2"), "x")


def test_ranks_divide_no_model_with_states():
    with pytest.raises(UnsupportedModelError, match=r"recurrent states .*: ranks do not divide states"):
        prepare_model(random_hybrid("lfm2"), "x", division=SimpleNamespace(first=True))
