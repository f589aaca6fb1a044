"""Training a drafter: the unrolled head is the drafting head, data is reproducible, and the result is a checkpoint."""

import json

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from wingbeat.runtime.drafters.checkpoint import load_eagle_head
from wingbeat.runtime.drafters.eagle_head import EagleHead, EagleHeadConfig
from wingbeat.runtime.training import drafter
from wingbeat.runtime.training.corpus import WindowSampler
from wingbeat.runtime.training.drafter import TrainDrafterConfig, train_drafter
from wingbeat.runtime.training.evaluation import greedy_acceptance
from wingbeat.runtime.training.rollouts import RowSampler, make_rollouts
from wingbeat.runtime.training.tokenizer import train_tokenizer
from wingbeat.runtime.training.unroll import distillation_loss, matches, unroll
from wingbeat.runtime.training.verifier import FrozenVerifier, default_tap_layers

VOCAB, HIDDEN, TAPS = 320, 32, (0, 1, 2)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def verifier_path(tmp_path):
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
    )
    path = tmp_path / "verifier"
    LlamaForCausalLM(config).save_pretrained(path)
    train_tokenizer(["def f(x):\n    return x\n" * 9, "class A:\n    y = [1, 2]\n" * 9], VOCAB, 64).save_pretrained(
        path
    )
    return path


@pytest.fixture
def verifier(verifier_path):
    return FrozenVerifier(str(verifier_path), TAPS, "cpu", torch.float32)


@pytest.fixture
def head():
    torch.manual_seed(1)
    config = EagleHeadConfig(
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        target_hidden_size=HIDDEN,
        tap_layers=TAPS,
        vocab_size=VOCAB,
        draft_vocab_size=200,
    )
    head = EagleHead(config)
    head.draft_token_ids.copy_(torch.randperm(VOCAB)[:200].sort().values)
    return head


@pytest.fixture
def corpus(tmp_path):
    root = tmp_path / "corpus"
    root.mkdir()
    for i in range(100):
        (root / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 8)
    return root


class Drafting:
    """Attention of one sequence as a drafter has it: a growing list of keys and values, everything visible."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values

    def __call__(self, query, key, value):
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        self.values = value if self.values is None else torch.cat([self.values, value])
        q, k, v = (x.transpose(0, 1)[None] for x in (query, self.keys, self.values))
        past = k.shape[2] - q.shape[2]
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(past)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)


@torch.no_grad()
def draft_chain(
    head: EagleHead, tokens: Tensor, taps: Tensor, start: int, num_steps: int, forced: bool
) -> list[Tensor]:
    """Logits of a chain after the true features 0..start, from the sequence's tokens or from the head's own."""
    attend = Drafting()
    hidden = head(tokens[1 : start + 2], head.fuse(taps[: start + 1]), head.rotary(torch.arange(start + 1)), attend)[
        -1:
    ]
    logits = [head.logits(hidden)[0]]
    for step in range(1, num_steps):
        own = head.draft_token_ids[logits[-1].argmax(-1, keepdim=True)]
        token = tokens[start + 1 + step][None] if forced else own
        hidden = head(token, head.feedback(hidden), head.rotary(torch.tensor([start + step])), attend)
        logits.append(head.logits(hidden)[0])
    return logits


def test_the_unrolled_head_is_the_drafting_head(head, verifier):
    tokens = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(2))
    taps = verifier.observe(tokens).taps
    steps = list(unroll(head, tokens, taps, 4))
    for row, start in ((0, 0), (0, 9), (1, 14)):
        chain = draft_chain(head, tokens[row], taps[row], start, 4, forced=True)
        for unrolled, drafted in zip(steps, chain, strict=True):
            torch.testing.assert_close(unrolled.logits[row, start], drafted, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_cross_entropy_to_the_next_verifier_distributions(head, verifier):
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    seen = verifier.observe(tokens)
    loss = distillation_loss(head, tokens, seen.taps, seen.logits, 3, 0.5)
    probabilities = seen.logits.double().softmax(-1)[0][:, head.draft_token_ids]
    expected = 0.0
    for start in range(5):
        for step, logits in enumerate(draft_chain(head, tokens[0], seen.taps[0], start, 3, forced=True)):
            cross_entropy = -(probabilities[start + 1 + step] * logits.double().log_softmax(-1)).sum()
            expected += 0.5**step * float(cross_entropy) / 5 / 1.75
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


def test_simulated_acceptance_is_that_of_real_drafting(verifier, head):
    # A head trained for a moment on these very sequences gets some drafts right and others wrong.
    prompts = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(6))
    text = verifier.continue_text(prompts, 30, torch.zeros(4))
    seen = verifier.observe(text)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(25):
        distillation_loss(head, text, seen.taps, seen.logits * 4, 3, 0.9).backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = greedy_acceptance(head, verifier, prompts, num_tokens=16, num_steps=3)

    accepted, rounds = 0, 0
    for row in range(4):
        committed = 6
        while committed < 22:
            chain = draft_chain(head, text[row], seen.taps[row], committed - 1, 3, forced=False)
            drafts = [int(head.draft_token_ids[logits.argmax()]) for logits in chain]
            wanted = text[row, committed + 1 : committed + 4].tolist()
            count = next((i for i, (a, b) in enumerate(zip(drafts, wanted, strict=True)) if a != b), 3)
            accepted, rounds = accepted + count, rounds + 1
            committed += count + 1
    assert measured.num_rounds == rounds
    assert measured.length == pytest.approx(1 + accepted / rounds, abs=1e-3)
    assert 1.0 < measured.length < 4.0


def test_matches_ask_for_the_greedy_draft(head, verifier):
    tokens = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(8))
    taps = verifier.observe(tokens).taps
    hits = matches(head, tokens, taps, 2)
    first = next(iter(unroll(head, tokens, taps, 2))).logits.argmax(-1)
    assert hits.shape == (1, 9, 2)
    assert torch.equal(hits[..., 0], head.draft_token_ids[first] == tokens[:, 2:11])


def test_greedy_rows_equal_generate(verifier):
    prefix = torch.randint(1, VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    ours = verifier.continue_text(prefix, 15, torch.zeros(2))
    theirs = verifier.model.generate(prefix, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(ours, theirs)


def test_temperature_is_per_row_and_samples_the_softmax(verifier):
    prefix = torch.full((4000, 2), 7)
    temperature = torch.full((4000,), 1.3)
    temperature[0] = 0
    generator = torch.Generator().manual_seed(9)
    drawn = verifier.continue_text(prefix, 3, temperature, generator)[:, -1]
    logits = verifier.observe(prefix[:1]).logits[0, -1]
    assert drawn[0] == logits.argmax()
    expected = (logits / 1.3).softmax(-1)
    counts = torch.bincount(drawn[1:], minlength=VOCAB)
    likely = expected * 3999 >= 5
    chi_square = float(((counts - 3999 * expected) ** 2 / (3999 * expected))[likely].sum())
    degrees = int(likely.sum())
    # Five standard deviations above the mean of a chi-square with that many degrees of freedom.
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_interrupted_rollouts_equal_uninterrupted_ones(verifier, tmp_path):
    sampler = WindowSampler([torch.randint(VOCAB, (900,), generator=torch.Generator().manual_seed(1))], 0)
    settings = dict(num_rows=100, length=12, greedy_fraction=0.5, temperature=1.0, seed=4)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = make_rollouts(verifier, sampler, tmp_path / "whole", **settings)
    make_rollouts(verifier, sampler, tmp_path / "parts", **settings | {"num_rows": 64})
    assert torch.equal(make_rollouts(verifier, sampler, tmp_path / "parts", **settings), whole)
    assert not torch.equal(make_rollouts(verifier, sampler, tmp_path / "parts", **settings | {"seed": 5}), whole)


def test_an_epoch_of_rows_shows_every_row_once():
    sampler = RowSampler(torch.arange(10)[:, None], seed=0)
    assert sorted(torch.cat([sampler.batch(cursor, 5) for cursor in (2, 3)]).flatten().tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("num_layers", "taps"), [(32, (2, 16, 29)), (80, (2, 40, 77)), (6, (1, 3, 5)), (2, (1,)), (1, (0,))]
)
def test_default_taps_are_distinct_inputs_of_layers(num_layers, taps):
    assert default_tap_layers(num_layers) == taps


def test_a_tap_outside_the_model_is_refused(verifier_path):
    with pytest.raises(ValueError, match=r"tap_layers=\(1, 3\)"):
        FrozenVerifier(str(verifier_path), (1, 3), "cpu", torch.float32)


@pytest.fixture
def config(corpus, verifier_path, tmp_path):
    return TrainDrafterConfig(
        corpus=corpus,
        output=tmp_path / "drafter",
        verifier=str(verifier_path),
        tap_layers=TAPS,
        steps=6,
        batch_size=4,
        sequence_length=16,
        ttt_steps=3,
        draft_vocab_size=200,
        rollout_rows=64,
        precision="float32",
        threads=1,
        log_interval_steps=1,
        warmup_steps=1,
    )


def losses(config) -> list:
    return json.loads((config.output / "metrics.json").read_text())["losses"]


def test_the_result_is_a_checkpoint_without_an_embedding(config, monkeypatch):
    monkeypatch.setattr(drafter, "_EVALUATION_PROMPTS", 2)
    monkeypatch.setattr(drafter, "_EVALUATION_TOKENS", 4)
    config = config.model_copy(update={"steps": 30})
    train_drafter(config)
    embedding = torch.randn(VOCAB, HIDDEN)
    target = dict(target_hidden_size=HIDDEN, target_num_layers=3, target_vocab_size=VOCAB)
    head = load_eagle_head(config.output, **target, target_embedding=embedding)
    assert head.config.tap_layers == TAPS
    assert head.config.draft_vocab_size == 200
    assert head.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    metrics = json.loads((config.output / "metrics.json").read_text())
    assert metrics["acceptance"]["length"] >= 1
    assert metrics["losses"][-1][1] < metrics["losses"][0][1]
    assert {path.name for path in config.output.iterdir()} == {"config.json", "model.safetensors", "metrics.json"}


def test_a_killed_run_continues_with_the_same_losses(config, tmp_path, monkeypatch):
    monkeypatch.setattr(drafter, "_EVALUATION_PROMPTS", 10**6)
    uninterrupted = config.model_copy(update={"output": tmp_path / "whole"})
    train_drafter(uninterrupted)
    config = config.model_copy(update={"checkpoint_interval_s": 1e-9})
    real_loss, calls = drafter.distillation_loss, []

    def dying_loss(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real_loss(*args)

    monkeypatch.setattr(drafter, "distillation_loss", dying_loss)
    with pytest.raises(KeyboardInterrupt):
        train_drafter(config)
    monkeypatch.setattr(drafter, "distillation_loss", real_loss)
    train_drafter(config)
    assert losses(config) == losses(uninterrupted)


def test_a_chain_that_does_not_fit_the_sequence_is_refused(config):
    with pytest.raises(ValueError, match="sequence_length=9 leaves no chain of ttt_steps=8"):
        TrainDrafterConfig(**config.model_dump() | {"sequence_length": 9, "ttt_steps": 8})
