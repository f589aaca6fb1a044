"""Initial weights of a head: the verifier's last layer, or another head."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from examples.demo_pair.training.train_base import train_tokenizer
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.unroll import unroll
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.training import drafter
from wingbeat.runtime.training.drafter import TrainDrafterConfig, train_drafter
from wingbeat.runtime.training.head_init import initial_eagle1_head, initial_eagle3_head
from wingbeat.runtime.training.verifier_weights import weights_of_checkpoint, weights_of_model

VOCAB, HIDDEN = 320, 32


@pytest.fixture
def verifier(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    model.save_pretrained(tmp_path / "verifier")
    train_tokenizer(["def f(x):\n    return x\n" * 9], VOCAB, 64).save_pretrained(tmp_path / "verifier")
    return FrozenVerifier(str(tmp_path / "verifier"), (0, 1, 2), "cpu", torch.float32)


def start(verifier, **changes):
    settings = dict(draft_vocab_size=100, intermediate_size=None, seed=0)
    counts = torch.arange(VOCAB).flip(0)
    return initial_eagle3_head(weights_of_model(verifier), (0, 1, 2), counts, **settings | changes)


def test_without_its_embedding_a_new_head_is_the_verifiers_last_layer(verifier):
    head = start(verifier)
    with torch.no_grad():
        head.qkv_proj.weight[:, :HIDDEN] = 0
    tokens = torch.randint(VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))
    seen = verifier.observe(tokens)
    logits = next(iter(unroll(head, tokens, seen.taps, 1))).logits
    torch.testing.assert_close(logits, seen.logits[:, :12, head.draft_token_ids], rtol=1e-4, atol=1e-4)


def test_the_most_frequent_tokens_are_drafted_in_ascending_order(verifier):
    assert torch.equal(start(verifier).draft_token_ids, torch.arange(100))
    assert start(verifier, draft_vocab_size=10**6).config.draft_vocab_size == VOCAB


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_weights_are_the_same_from_the_model_and_from_its_files(verifier, format):
    loaded, folder = weights_of_model(verifier), Path(verifier.model.name_or_path)
    if format == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(verifier.model.state_dict(), folder / "pytorch_model.bin")
    read = weights_of_checkpoint(TargetDescription.from_checkpoint(folder))
    assert torch.equal(read.embedding, loaded.embedding)
    assert torch.equal(read.lm_head, loaded.lm_head)
    assert read.vocab_size == VOCAB
    assert read.last_layer.keys() == loaded.last_layer.keys()
    assert all(torch.equal(read.last_layer[name], tensor) for name, tensor in loaded.last_layer.items())


def test_a_checkpoint_without_an_output_matrix_is_refused(verifier):
    folder = Path(verifier.model.name_or_path)
    kept = {name: part for name, part in load_file(folder / "model.safetensors").items() if "lm_head" not in name}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds no tensor lm_head\.weight"):
        weights_of_checkpoint(TargetDescription.from_checkpoint(folder))


def test_an_eagle1_head_starts_from_the_feature_and_keeps_the_verifiers_ends(verifier):
    head = initial_eagle1_head(weights_of_model(verifier), intermediate_size=None, seed=0)
    features = torch.randn(2, 5, HIDDEN)
    tokens = torch.randint(VOCAB, (2, 5))
    torch.testing.assert_close(head.fc(torch.cat([head.embed_tokens(tokens), features], dim=-1)), features)
    assert torch.equal(head.lm_head.weight, verifier.lm_head)
    assert head.tap_layers == (3,)
    frozen = {name for name, parameter in head.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


def test_a_narrower_head_keeps_what_does_not_fit_at_random(verifier):
    head = start(verifier, intermediate_size=20)
    assert head.down_proj.weight.shape == (HIDDEN, 20)
    assert torch.equal(head.o_proj.weight, verifier.layers[-1].self_attn.o_proj.weight)


def test_training_continues_another_head(verifier, tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(60):
        (corpus / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 8)
    other = start(verifier)
    with torch.no_grad():
        other.norm.weight.fill_(0.25)
    save_eagle_head(other, tmp_path / "other", with_embedding=False)
    started = []

    def watch(config, ranks, task):
        started.append(task.model)
        raise KeyboardInterrupt

    monkeypatch.setattr(drafter, "optimize", watch)
    config = TrainDrafterConfig(
        corpus=corpus,
        output=tmp_path / "out",
        verifier=verifier.model.name_or_path,
        tap_layers=(0, 1, 2),
        initial_head=tmp_path / "other",
        sequence_length=16,
        rollout_rows=0,
        precision="float32",
        validation_prompts=0,
    )
    with pytest.raises(KeyboardInterrupt):
        train_drafter(config)
    assert torch.equal(started[0].norm.weight, other.norm.weight)
    assert {n for n, p in started[0].named_parameters() if not p.requires_grad} == {"embed_tokens.weight"}
