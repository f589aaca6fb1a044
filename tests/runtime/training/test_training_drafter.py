"""Training a drafter: the unrolled head is the drafting head, data is reproducible, and the result is a checkpoint."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.heads.head_folder import target_of
from tests.runtime.training_world import (
    HIDDEN,
    TAPS,
    VOCAB,
    losses,
    make_corpus,
    make_head,
    make_verifier,
    metrics,
    short_run,
)
from wingbeat.runtime.heads.conventions import default_tap_layers
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.unroll import matches, unroll
from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.recordings.token_windows import WindowSampler
from wingbeat.runtime.training import drafter as training
from wingbeat.runtime.training.drafter import TrainDrafterConfig, train_drafter
from wingbeat.runtime.training.evaluation import greedy_acceptance, recorded_acceptance
from wingbeat.runtime.training.losses import DenseTarget, DraftLoss, TopTarget
from wingbeat.runtime.training.rollouts import RowSampler, make_rollouts


@pytest.fixture
def verifier_path(tmp_path):
    return make_verifier(tmp_path)


@pytest.fixture
def verifier(verifier_path):
    return FrozenVerifier(str(verifier_path), TAPS, "cpu", torch.float32)


@pytest.fixture
def head():
    torch.manual_seed(1)
    head = make_head(200)
    head.draft_token_ids.copy_(torch.randperm(VOCAB)[:200].sort().values)
    return head


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


def expected_loss(head, tokens, taps, probabilities, num_steps, decay, masked=()) -> float:
    """By chains drafted one by one, in float64; a chain ends at its first wrong draft and at the tokens `masked`."""
    probabilities = probabilities.double()[:, head.draft_token_ids]
    total, num_chains = 0.0, len(tokens) - num_steps - 1
    for start in range(num_chains):
        for step, logits in enumerate(draft_chain(head, tokens, taps, start, num_steps, forced=True)):
            if start + 2 + step in masked:
                break
            cross_entropy = -(probabilities[start + 1 + step] * logits.double().log_softmax(-1)).sum()
            total += decay**step * float(cross_entropy) / num_chains
            if head.draft_token_ids[logits.argmax()] != tokens[start + 2 + step]:
                break
    return total / sum(decay**step for step in range(num_steps))


def test_the_loss_is_the_cross_entropy_to_the_next_verifier_distributions(head, verifier):
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    seen = verifier.observe(tokens)
    loss = DraftLoss(head, 3, 0.5)(tokens, seen.taps, DenseTarget(seen.logits))
    wanted = expected_loss(head, tokens[0], seen.taps[0], seen.logits[0].softmax(-1), 3, 0.5)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4)


def test_the_loss_from_the_likeliest_tokens_leaves_the_rest_out(head, verifier):
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    seen = verifier.observe(tokens)
    probabilities = (seen.logits * 4).softmax(-1)
    top = probabilities.topk(20)
    kept = torch.zeros_like(probabilities).scatter(-1, top.indices, top.values)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 4] = mask[0, 5] = False
    loss = DraftLoss(head, 3, 0.5)(tokens, seen.taps, TopTarget(top.indices, top.values), mask)
    wanted = expected_loss(head, tokens[0], seen.taps[0], kept[0], 3, 0.5, masked=(4, 5))
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4)
    everything = probabilities.topk(VOCAB)
    torch.testing.assert_close(
        DraftLoss(head, 3, 0.5)(tokens, seen.taps, TopTarget(everything.indices, everything.values)),
        DraftLoss(head, 3, 0.5)(tokens, seen.taps, DenseTarget(seen.logits * 4)),
    )


@pytest.mark.slow
def test_simulated_acceptance_is_that_of_real_drafting(verifier, head):
    # A head trained for a moment on these very sequences gets some drafts right and others wrong.
    prompts = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(6))
    text = verifier.continue_text(prompts, 30, torch.zeros(4))
    seen = verifier.observe(text)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    loss = DraftLoss(head, 3, 0.9)
    for _ in range(25):
        loss(text, seen.taps, DenseTarget(seen.logits * 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = greedy_acceptance(partial(matches, head), verifier, prompts, num_tokens=16, num_steps=3)

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
    # Recorded answers behind those prompts, as long as rounds of the same tokens need them.
    records = [Record(text[row, :27].int(), seen.taps[row, :27], torch.arange(27) >= 6) for row in range(4)]
    assert recorded_acceptance(partial(matches, head), records, 3) == measured


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


@pytest.mark.slow
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


def test_the_last_tap_is_what_enters_the_output_matrix(verifier_path):
    verifier = FrozenVerifier(str(verifier_path), (2, 3), "cpu", torch.float32)
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))
    seen = verifier.observe(tokens)
    torch.testing.assert_close(seen.taps[..., HIDDEN:] @ verifier.lm_head.T, seen.logits)
    other = FrozenVerifier(str(verifier_path), (2,), "cpu", torch.float32)
    assert torch.equal(seen.taps[..., :HIDDEN], other.observe(tokens).taps)


def test_a_tap_outside_the_model_is_refused(verifier_path):
    with pytest.raises(ValueError, match=r"tap_layers \[4\] do not exist"):
        FrozenVerifier(str(verifier_path), (1, 4), "cpu", torch.float32)


@pytest.fixture
def config(verifier_path, tmp_path):
    make_corpus(tmp_path)
    return short_run(tmp_path, tmp_path / "drafter", tap_layers=TAPS)


@pytest.mark.slow
def test_the_result_is_a_checkpoint_without_an_embedding(config, monkeypatch):
    monkeypatch.setattr(training, "NEW_TOKENS", 4)
    config = config.model_copy(update={"steps": 30, "validation_prompts": 2})
    train_drafter(config)
    embedding = torch.randn(VOCAB, HIDDEN)
    head = load_eagle_head(config.output, target_of(HIDDEN, 3, VOCAB, embedding=embedding))
    assert head.config.tap_layers == TAPS
    assert head.config.draft_vocab_size == 200
    assert head.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    assert metrics(config)["acceptance"]["length"] >= 1
    assert losses(config)[-1] < losses(config)[0]
    assert {path.name for path in config.output.iterdir()} == {"config.json", "model.safetensors", "metrics.json"}


@pytest.mark.slow
def test_accumulated_parts_are_the_whole_batch(config, tmp_path):
    weights = []
    for parts in (1, 4):
        one = config.model_copy(update={"output": tmp_path / str(parts), "accumulation_steps": parts})
        train_drafter(one)
        weights.append(load_file(one.output / "model.safetensors"))
    whole, parts = (losses(config.model_copy(update={"output": tmp_path / str(n)})) for n in (1, 4))
    assert whole == pytest.approx(parts, rel=1e-3)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=2e-2, atol=1e-3)


def test_a_batch_that_does_not_split_is_refused(config):
    with pytest.raises(ValueError, match="batch_size=4 does not split into 3 equal parts"):
        train_drafter(config.model_copy(update={"accumulation_steps": 3}))


def test_a_chain_that_does_not_fit_the_sequence_is_refused(config):
    with pytest.raises(ValueError, match="sequence_length=9 is too short for a chain of ttt_steps=8"):
        TrainDrafterConfig(**config.model_dump() | {"sequence_length": 9, "ttt_steps": 8})
