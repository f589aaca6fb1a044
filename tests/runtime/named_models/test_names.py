"""A name stands wherever a folder does, and brings its own draft head."""

from pathlib import Path

import pytest

from tests.runtime.models import engine_config, greedy, greedy_params, random_head, random_prompts
from tests.runtime.named_models.wheel_world import NAME, name_it, publish, use_index
from tests.runtime.quantised.gguf_world import TOKENS, write_model
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.choice import CHECKPOINT, FALLBACK, parse_drafter
from wingbeat.runtime.folder_kinds import folder_problem
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.named_models.table import NamedModel, named_model, own_head
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A model of four layers that can be fetched by its name."""
    use_index(tmp_path / "index", tmp_path / "cache", monkeypatch)
    write_model(tmp_path / "source.gguf", "Q4_1")
    made = publish(tmp_path / "source.gguf", tmp_path / "index")
    name_it(made, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_name_is_the_folder_of_its_file(model: NamedModel, tmp_path: Path):
    assert folder_problem(NAME) is None
    assert not model.file.exists(), "asking what a word is fetches nothing"
    folder = checkpoint_folder(NAME)
    assert (folder / "model.gguf").resolve() == model.file
    assert checkpoint_folder(model.file) == folder
    assert TargetDescription.from_checkpoint(NAME).path == folder
    assert named_model("no-such-name") is None


def test_a_folder_of_that_name_comes_first(model: NamedModel, tmp_path: Path):
    (tmp_path / NAME).mkdir()
    assert checkpoint_folder(NAME) == Path(NAME)
    assert "is empty" in folder_problem(NAME)


def test_a_model_without_a_head_has_the_fallback(model: NamedModel):
    assert parse_drafter("auto", Path(NAME)) == FALLBACK
    assert own_head(NAME) is None


def test_a_head_of_its_own_drafts_where_its_folder_is_there(
    model: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    head = tmp_path / "tiny_eagle3" / "head"
    name_it(model._replace(head=head), monkeypatch)
    assert parse_drafter("auto", Path(NAME)) == FALLBACK
    meant = write_model(tmp_path / "again.gguf", "Q4_1")
    prompts = random_prompts((5, 9), len(TOKENS))
    expected, _ = greedy(meant, prompts, 16)
    hidden_size = meant.config.hidden_size
    save_eagle_head(random_head(prepare_model(meant, NAME), hidden_size=hidden_size), head, with_embedding=False)
    choice = parse_drafter("auto", Path(NAME))
    assert (choice.kind, choice.source, choice.label) == (CHECKPOINT, head, "tiny_eagle3")
    assert parse_drafter("none", Path(NAME)).drafts is False
    llm = LLM(NAME, "auto", engine_config(), InProcessChannel, device="cpu", allow_bad_drafter=True)
    written = llm.generate(prompts, [greedy_params(16)] * len(prompts))
    assert [one.token_ids for one in written] == expected
    assert all(one.metrics.num_drafts for one in written)
