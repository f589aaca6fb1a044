"""A head uses the verifier's tensors in memory instead of reading its own copy, if they equal the file's."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.runtime.models import random_model
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.lendable import lendable
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import EMBEDDING, LM_HEAD, TargetDescription
from wingbeat.runtime.verifier.layers.linears import dense_weight
from wingbeat.runtime.verifier.loading.loader import load_model, prepare_model

PAIR = demo_pair()
BF16 = torch.bfloat16


class Verifier:
    """A verifier that lends tensors and records the names it was asked for."""

    def __init__(self, **lent: Tensor) -> None:
        self.lent = {name.replace("__", "."): tensor for name, tensor in lent.items()}
        self.asked: list[str] = []

    def __call__(self, name: str) -> Tensor | None:
        self.asked.append(name)
        return self.lent.get(name)


@pytest.fixture(scope="module")
def embedding() -> Tensor:
    """Embedding of the demo verifier, which is absent from the demo's head."""
    return TargetDescription.from_checkpoint(PAIR.verifier).embedding()


def test_a_head_reads_an_embedding_where_it_lies_in_the_place_of_a_copy(embedding: Tensor, caplog):
    verifier = Verifier(embed_tokens__weight=embedding.clone())
    with caplog.at_level(logging.INFO):
        head = load_eagle_head(PAIR.drafter, TargetDescription.from_checkpoint(PAIR.verifier, verifier), BF16)
    assert verifier.asked == [EMBEDDING]
    assert head.embed_tokens.weight.data_ptr() == verifier.lent[EMBEDDING].data_ptr()
    own = load_eagle_head(PAIR.drafter, TargetDescription.from_checkpoint(PAIR.verifier), BF16)
    assert all(torch.equal(one, other) for one, other in zip(head.parameters(), own.parameters(), strict=True))
    assert "the drafter shares the verifier's embed_tokens.weight (0.00 GB)" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_verifier_that_lends_nothing_leaves_the_files(embedding: Tensor):
    verifier = Verifier()
    head = load_eagle_head(PAIR.drafter, TargetDescription.from_checkpoint(PAIR.verifier, verifier), BF16)
    assert verifier.asked == [EMBEDDING]
    assert torch.equal(head.embed_tokens.weight, embedding)


def another_first_row(rows: Tensor) -> Tensor:
    return rows.index_fill(0, torch.tensor([0]), 1.0)


def another_last_row(rows: Tensor) -> Tensor:
    return rows.index_fill(0, torch.tensor([len(rows) - 1]), 1.0)


@pytest.mark.parametrize(
    "change", [torch.zeros_like, another_first_row, another_last_row, lambda rows: rows[:-1], lambda rows: rows * 2]
)
def test_memory_that_holds_something_else_is_not_used_and_one_line_says_so(embedding: Tensor, caplog, change):
    """Memory differs where processes cannot share it, or where the verifier scales its embedding at load."""
    verifier = Verifier(embed_tokens__weight=change(embedding))
    head = load_eagle_head(PAIR.drafter, TargetDescription.from_checkpoint(PAIR.verifier, verifier), BF16)
    assert torch.equal(head.embed_tokens.weight, embedding)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == (
        "the drafter loads its own copy of model.embed_tokens.weight: the verifier's differs from the file's"
    )


def test_an_embedding_in_the_dtype_of_the_verifier_is_held_against_the_file_in_that(embedding: Tensor):
    rounded = embedding.to(torch.float16)
    verifier = Verifier(embed_tokens__weight=rounded)
    head = load_eagle_head(PAIR.drafter, TargetDescription.from_checkpoint(PAIR.verifier, verifier), torch.float16)
    assert head.embed_tokens.weight.data_ptr() == rounded.data_ptr()


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_an_output_matrix_borrows_that_too(tmp_path, tied: bool):
    model = random_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "verifier")
    loaded, config = prepare_model(model, "llama"), model.config
    fields = dict(intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    sizes = dict(hidden_size=config.hidden_size, target_hidden_size=config.hidden_size)
    vocab = dict(vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size)
    head = Eagle1Head(Eagle1HeadConfig(**fields, **sizes, **vocab, tap_layers=(config.num_hidden_layers,)))
    save_eagle_head(head, tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in (EMBEDDING, LM_HEAD)}
    save_file(tensors, path)
    weights = {EMBEDDING: loaded.model.get_input_embeddings(), LM_HEAD: loaded.model.get_output_embeddings()}
    weights = {name: dense_weight(module).clone() for name, module in weights.items()}
    if tied:
        weights[LM_HEAD] = weights[EMBEDDING]
    verifier = Verifier(**{name.replace(".", "__"): weight for name, weight in weights.items()})
    target = TargetDescription.from_checkpoint(tmp_path / "verifier", verifier)
    borrower = load_eagle_head(tmp_path / "head", target, torch.float32)
    assert borrower.embed_tokens.weight.data_ptr() == weights[EMBEDDING].data_ptr()
    assert borrower.lm_head.weight.data_ptr() == weights[LM_HEAD].data_ptr()
    assert verifier.asked == ([EMBEDDING] if tied else [EMBEDDING, LM_HEAD])


@pytest.mark.slow
def test_a_verifier_lends_the_weights_that_are_in_the_heads_dtype():
    loaded = load_model(PAIR.verifier, torch.float32, torch.device("cpu"))
    weights = lendable(loaded, torch.float32)
    assert weights[EMBEDDING].data_ptr() == loaded.model.get_input_embeddings().weight.data_ptr()
    if not hasattr(loaded.model.get_output_embeddings(), "panels"):
        assert weights[LM_HEAD].shape == (loaded.vocab_size, loaded.hidden_size)
    else:
        assert weights[LM_HEAD] == "the verifier holds it packed"
    assert lendable(loaded, BF16)[EMBEDDING] == "the verifier's is float32 and the drafter's bfloat16"
    loaded.model.set_output_embeddings(torch.nn.Identity())
    assert lendable(loaded, torch.float32)[LM_HEAD] == "the verifier holds it in another form"
