"""A user's class by import path: each mistake has its own error, and the worked example drafts through the engine."""

import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.models import CHAIN, TREE, engine_config, generate, greedy_params, reference
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.user_drafter.user_drafter import UserDrafterError, find_class

EXAMPLE = Path(__file__).parents[3] / "examples" / "user_drafter"
TARGET = TargetDescription(Path("a verifier"), hidden_size=64, num_layers=4, vocab_size=97)

MODULE = """
import torch
from wingbeat.runtime.drafters.base import Drafter, DrafterNeeds


class Whole(Drafter):
    def __init__(self, target, speculation, options):
        self.given = (target, speculation, options)

    def resize(self, spec, num_slots, num_blocks): ...
    def commit(self, batch): ...
    def propose(self, batch): ...


class NoPropose(Drafter):
    def resize(self, spec, num_slots, num_blocks): ...
    def commit(self, batch): ...


class OnlyCommit(Drafter):
    def commit(self, batch): ...


class Plain: ...


class Raises(Whole):
    def __init__(self, target, speculation, options):
        raise KeyError("weights")


class OtherArguments(Whole):
    def __init__(self, target): ...


class WrongNeeds(Whole):
    needs = (1, 2)


class WrongDevice(Whole):
    device = "cuda:0"


number = 7
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder on the path with modules of a user's."""
    (tmp_path / "my_drafters.py").write_text(MODULE)
    (tmp_path / "broken_drafters.py").write_text("import no_such_library\n")
    (tmp_path / "failing_drafters.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_class_is_given_verifier_shape_and_options(modules):
    options = DrafterOptions(torch.bfloat16)
    drafter = load_drafter("my_drafters.Whole", TARGET, TREE, options)
    assert drafter.given == (TARGET, TREE, options)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_modules.Whole", "there is no module my_modules; is its folder on PYTHONPATH"),
        ("my_drafters.deeper.Whole", "there is no module my_drafters.deeper"),
        ("my_drafters.Hole", "module my_drafters has no Hole"),
        ("my_drafters.number", "is not a class but a int"),
        ("my_drafters.Plain", "is not a subclass of wingbeat.runtime.drafters.base.Drafter"),
        ("my_drafters.NoPropose", "lacks the method propose"),
        ("my_drafters.OnlyCommit", "lacks the methods propose, resize"),
        ("my_drafters.Raises", "its constructor raised KeyError: 'weights'"),
        ("my_drafters.OtherArguments", "its constructor raised TypeError"),
        ("my_drafters.WrongNeeds", r"its `needs` is \(1, 2\), it must be a DrafterNeeds"),
        ("my_drafters.WrongDevice", "its `device` is 'cuda:0', it must be a torch.device"),
        ("broken_drafters.Whole", "importing broken_drafters raised ModuleNotFoundError: No module named 'no_such_lib"),
        ("failing_drafters.Whole", "importing failing_drafters raised RuntimeError: no licence"),
    ],
)
def test_each_mistake_has_its_own_error(modules, path, message):
    with pytest.raises(UserDrafterError, match=message) as caught:
        load_drafter(path, TARGET, CHAIN)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_without_a_dot_is_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match=r"'Whole': must be .* your own class as 'module.path.ClassName'"):
        load_drafter("Whole", TARGET, CHAIN)
    with pytest.raises(UserDrafterError, match=r"'Whole' names no module: write module\.path\.ClassName"):
        find_class("Whole")


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [CHAIN, TREE, SpeculationConfig(1, 1, 2)], ids=["chain", "tree", "one"])
def test_the_example_drafts_and_changes_no_token(shape, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    ref = reference("llama")
    drafter = load_drafter("bigram_drafter.BigramDrafter", TARGET, shape)
    tokens, engine = generate(ref.loaded, engine_config(shape), drafter, ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert engine.speculation.num_accepted_tokens > 0
    assert engine.drafter_state == "attached"
