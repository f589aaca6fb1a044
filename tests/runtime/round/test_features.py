"""Features are columns: who builds and runs batches knows none of them, and a feature that is off has none."""

import ast
from pathlib import Path

import pytest

from tests.runtime.models import engine_config, greedy_params, new_engine, prepare_model, random_model
from wingbeat.runtime import round, verifier
from wingbeat.runtime.round.rows import Feature
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

CORE = (
    *sorted(Path(round.__file__).parent.glob("*.py")),
    Path(verifier.__file__).parent / "model.py",
    Path(verifier.__file__).parent / "layers" / "attention.py",
)
FEATURES = ("adapter", "lora", "image", "vision", "mixer", "roundstates", "state_keeper", "grammar")


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_names_no_feature(path):
    tree = ast.parse(path.read_text())
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    words |= {f"{node.module}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [word for word in words if any(feature in word.lower() for feature in FEATURES)]


def passes_of(engine, **fields) -> list:
    """The batches that a request's rounds run."""
    seen, forward = [], engine.model.forward

    def watched(batch):
        seen.append(batch)
        return forward(batch)

    engine.model.forward = watched
    engine.add_request(Request("one", (1, 2, 3), greedy_params(3), **fields))
    while engine.has_unfinished_requests():
        engine.step()
    return seen


def test_a_feature_that_is_off_adds_nothing():
    plain = passes_of(new_engine(prepare_model(random_model("llama"), "llama"), engine_config()))
    assert plain
    assert all(batch.around == () and not batch.columns for batch in plain)


class Watched(Feature):
    """Notes its life."""

    def __init__(self):
        self.calls = []

    def admit(self, seq):
        self.calls.append(("admit", seq.slot))

    def prepare(self, plan):
        self.calls.append(("prepare", len(plan.decodes)))

    def column(self, placed):
        self.calls.append("column")

    def took(self, accepted):
        self.calls.append(("took", accepted.slots.tolist(), accepted.num_tokens.tolist()))

    def leave(self, slot):
        self.calls.append(("leave", slot))


def test_a_feature_lives_with_each_sequence_and_each_round(monkeypatch):
    watched, loaded = Watched(), prepare_model(random_model("llama"), "llama")
    monkeypatch.setattr(LoadedModel, "own_features", property(lambda self: (watched,)))
    passes_of(new_engine(loaded, engine_config()))
    prompt, decode = [("prepare", 0), "column"], [("prepare", 1), "column", ("took", [0], [1])]
    assert watched.calls == [("admit", 0), *prompt, *decode, *decode, ("leave", 0)]
