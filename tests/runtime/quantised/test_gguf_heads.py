"""An EAGLE head drafts for a GGUF file, and takes from the file what its own files leave out."""

from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.runtime.models import CHAIN, TREE, engine_config, greedy, greedy_params, random_head, random_prompts
from tests.runtime.quantised.gguf_world import TOKENS, write_model
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.verifier.loading.loader import prepare_model

NUM_TOKENS = 24
PROMPTS = random_prompts((5, 23, 11), len(TOKENS))


class Pair(NamedTuple):
    file: Path
    head: Path
    meant: LlamaForCausalLM
    """The file's model, its numbers in float32."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    meant = write_model(folder / "tiny.gguf", "Q4_1")
    head = random_head(prepare_model(deepcopy(meant), "tiny"), hidden_size=meant.config.hidden_size)
    save_eagle_head(head, folder / "head", with_embedding=False)
    return Pair(folder / "tiny.gguf", folder / "head", meant)


def opened(pair: Pair, speculation=TREE, drafter: str | Path | None = None, **options) -> LLM:
    drafter = pair.head if drafter is None else drafter
    return LLM(pair.file, drafter, engine_config(speculation), InProcessChannel, device="cpu", **options)


@pytest.mark.parametrize("speculation", [TREE, CHAIN], ids=["tree", "chain"])
def test_a_head_changes_no_token(speculation, pair):
    llm = opened(pair, speculation, allow_bad_drafter=True)
    params = [greedy_params(NUM_TOKENS)] * len(PROMPTS)
    written = llm.generate(PROMPTS, params)
    assert [one.token_ids for one in written] == greedy(pair.meant, PROMPTS, NUM_TOKENS)[0]
    assert all(one.metrics.num_drafts for one in written)
    plain = [greedy_params(NUM_TOKENS, speculation=False)] * len(PROMPTS)
    assert [one.token_ids for one in llm.generate(PROMPTS, plain)] == [one.token_ids for one in written]
    assert llm.self_test.num_tokens


def test_a_head_is_held_to_its_self_test(pair):
    with pytest.raises(ValueError, match=r"drafter head does not suit .*first-position acceptance is 0\.\d\d"):
        opened(pair)


def test_a_head_of_another_verifier_is_refused_by_its_sizes(pair, tmp_path):
    other = write_model(tmp_path / "wide.gguf", "Q4_K")
    with pytest.raises(CheckpointError, match=str(other.config.hidden_size)):
        opened(pair._replace(file=tmp_path / "wide.gguf"))


def test_the_file_is_described_by_its_own_path(pair):
    target = TargetDescription.from_checkpoint(pair.file)
    config = pair.meant.config
    assert (target.hidden_size, target.num_layers) == (config.hidden_size, config.num_hidden_layers)
    assert torch.equal(target.embedding(), pair.meant.get_input_embeddings().weight)
