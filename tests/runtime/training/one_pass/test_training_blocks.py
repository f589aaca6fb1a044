"""Training of heads that draft in one pass: what is trained is what drafts, and what is written is what was trained."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.runtime.one_pass import one_pass_world
from tests.runtime.one_pass.one_pass_drafts import CAUSAL, FULL, TAPS, load
from tests.runtime.one_pass.one_pass_world import (
    EPS,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MLP,
    THETA,
    VOCAB,
    Reference,
    random_tensors,
    raw_config,
)
from tests.runtime.one_pass.parallel_eagle_world import ParallelReference
from wingbeat.runtime.heads.files import read_config
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.blocks import block_states, parallel_states
from wingbeat.runtime.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import load_parallel_head
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.families import FAMILIES as TRAINED
from wingbeat.runtime.training.losses import DenseTarget, TopTarget
from wingbeat.runtime.training.one_pass.block_losses import BlockLoss, LatticeLoss, MarkovLoss, ParallelLoss
from wingbeat.runtime.training.one_pass.one_pass_families import draw_anchors
from wingbeat.runtime.training.verifier_weights import weights_of_checkpoint

SHIFTED = {name for name in FAMILIES if name.startswith("dspark") and name != "dspark-fill-in"}
LENGTH, LAYERS = 22, 8
ANCHORS = torch.tensor([[1, 7, 13], [2, 3, 15]])


def text(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences and their taps."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    return tokens, torch.randn(2, LENGTH, len(TAPS) * HIDDEN, generator=generator)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Path:
    """A Llama whose shapes are those of the reference's heads."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPS,
        rope_parameters=rope,
    )
    path = tmp_path_factory.mktemp("verifier")
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize("masks", [FULL, CAUSAL, (False, 5), (True, 3)], ids=str)
@pytest.mark.parametrize("family", ["dflash", "dflash2"])
def test_a_block_among_many_is_the_block_alone(tmp_path, family, masks):
    causal, window = masks
    fields = {"is_causal": causal}
    if window is not None:
        fields |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    raw = raw_config(family, TAPS, 2, **fields)
    tensors = random_tensors(raw)
    tokens, taps = text()
    states = block_states(load(tmp_path, raw, tensors), tokens, taps, ANCHORS).unflatten(0, (2, -1))
    reference = Reference(raw, tensors, True, [masks] * 2)
    for row, column in ((0, 0), (0, 2), (1, 1)):
        anchor = int(ANCHORS[row, column])
        alone = reference.hidden(taps[row, :anchor], int(tokens[row, anchor]))
        torch.testing.assert_close(states[row, column], alone, rtol=1e-4, atol=1e-4)


def trained(verifier: Path, tmp_path: Path, family: str, **fields):
    """A new head whose weights are all other numbers, as bfloat16 has them; its family and settings."""
    fields = {"block_size": 6, "num_key_value_heads": KV_HEADS, "tap_layers": (0, 3, 6)} | fields
    if family in ("dspark", "dflash2"):
        fields = {"pair_rank": 8} | fields
    config = TrainDrafterConfig(verifier=str(verifier), output=tmp_path / "out", family=family, **fields)
    target = TargetDescription.from_checkpoint(verifier)
    counts = torch.arange(VOCAB).flip(0)
    head = TRAINED[family].new_head(config, target, weights_of_checkpoint(target), counts)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_((parameter + noise * parameter.requires_grad).bfloat16())
    return head, TRAINED[family], config, target


def reference_files(head, folder: Path) -> tuple[dict, dict]:
    """Config and tensors that were written, with the tensors that the verifier lends."""
    lent = {"embed_tokens.weight": head.embed_tokens.weight, "lm_head.weight": head.lm_head.weight}
    tensors = {name: tensor.detach() for name, tensor in lent.items()}
    tensors |= {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    return read_config(folder), tensors


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("dflash", {}),
        ("jetspec", {"num_layers": 1}),
        ("dspark", {"pair_rank": 0}),
        ("dspark", {}),
        ("dspark", {"markov_kind": "gated", "num_layers": 3}),
        ("dspark", {"markov_kind": "rnn", "confidence_weight": 0.0}),
        ("dflash2", {}),
    ],
    ids=str,
)
def test_what_is_written_is_the_head_that_was_trained(verifier, tmp_path, monkeypatch, family, fields):
    monkeypatch.setattr(one_pass_world, "TOP_K", 16)
    head, kind, config, target = trained(verifier, tmp_path, family, **fields)
    kind.export(head, config, verifier, tmp_path / "head")
    read = load_one_pass_head(read_one_pass_checkpoint(tmp_path / "head"), target, torch.float32, "cpu")
    tokens, taps = text()
    with torch.no_grad():
        ours, theirs = (block_states(one, tokens, taps, ANCHORS) for one in (head, read))
        assert torch.equal(ours, theirs)
        assert torch.equal(head.logits(ours), read.logits(theirs))
    raw, tensors = reference_files(head, tmp_path / "head")
    raw |= {name: value for name, value in raw.get("dflash_config", {}).items() if name == "mask_token_id"}
    layers = config.num_layers
    reference = Reference(raw, tensors, family != "dspark", [CAUSAL if family == "jetspec" else FULL] * layers)
    anchor = int(ANCHORS[0, 1])
    alone = reference.hidden(taps[0, :anchor], int(tokens[0, anchor]))
    torch.testing.assert_close(ours[1], alone, rtol=1e-4, atol=1e-4)
    walk, none = read.walk(ours), torch.zeros(len(ours), 1, dtype=torch.int64)
    for depth in range(read.config.num_drafted):
        following = walk.step(depth, tokens.gather(1, ANCHORS + depth).flatten()[:, None], none)
        expected = reference.next_logits(alone, tokens[0, anchor : anchor + depth + 1].tolist())
        if following.token_ids is not None:
            expected = expected[following.token_ids[1]]
        torch.testing.assert_close(following.logits[1, 0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("draft_vocab_size", [VOCAB, 50])
def test_a_parallel_head_is_trained_as_it_drafts_and_read_as_it_was_trained(verifier, tmp_path, draft_vocab_size):
    head, kind, config, target = trained(verifier, tmp_path, "p-eagle", num_layers=3, draft_vocab_size=draft_vocab_size)
    kind.export(head, config, verifier, tmp_path / "head")
    read = load_parallel_head(read_one_pass_checkpoint(tmp_path / "head"), target, torch.float32, "cpu")
    assert torch.equal(read.draft_token_ids, head.draft_token_ids)
    tokens, taps = text()
    raw, tensors = reference_files(head, tmp_path / "head")
    raw = raw["transformer_layer_config"] | {"ptd_token_id": raw["mask_token_id"]}
    reference = ParallelReference(raw, tensors)
    with torch.no_grad():
        pairs, slots = parallel_states(head, tokens, taps, ANCHORS, 5)
        assert torch.equal(slots, parallel_states(read, tokens, taps, ANCHORS, 5)[1])
        for row, column in ((0, 0), (0, 2), (1, 1)):
            anchor = int(ANCHORS[row, column])
            alone = reference.logits(taps[row, :anchor], tokens[row, 1 : anchor + 1], 5)
            ours = head.logits(torch.cat([pairs[row, anchor - 1][None], slots[row, column]]))
            torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)


def test_a_head_of_few_tokens_has_its_own_output_matrix_and_a_map(verifier, tmp_path):
    head, kind, config, target = trained(verifier, tmp_path, "dspark", draft_vocab_size=40)
    assert head.lm_head.weight.requires_grad
    kind.export(head, config, verifier, tmp_path / "head")
    read = load_one_pass_head(read_one_pass_checkpoint(tmp_path / "head"), target, torch.float32, "cpu")
    assert torch.equal(read.draft_token_ids, torch.arange(40))
    assert torch.equal(read.lm_head.weight, head.lm_head.weight)
    whole, *_ = trained(verifier, tmp_path, "dspark")
    frozen = {name for name, parameter in whole.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


def expected_loss(reference, target, decay: float, extra) -> float:
    """Loss from the reference's numbers, block by block: the cross-entropy and the family's own terms."""
    tokens, taps = text()
    size, total = reference.raw["block_size"] - reference.fill_in, 0.0
    for row, anchor in ((index // 3, int(anchor)) for index, anchor in enumerate(ANCHORS.flatten())):
        hidden = reference.hidden(taps[row, :anchor], int(tokens[row, anchor]))
        for depth in range(size):
            path = tokens[row, anchor : anchor + depth + 1].tolist()
            wanted = target[row, anchor + depth].double()
            total += decay**depth * extra(hidden, path, wanted, int(tokens[row, anchor + depth + 1]))
    return total / ANCHORS.numel() / sum(decay**depth for depth in range(size))


@pytest.mark.few(2)
@pytest.mark.parametrize("top", [None, 30], ids=["all logits", "the likeliest"])
@pytest.mark.parametrize("family", ["dflash", "dspark-vanilla", "dspark-rnn", "dflash2"])
def test_the_loss_is_the_sum_of_its_parts(tmp_path, family, top):
    fields = {"enable_confidence_head": True} if family.startswith("dspark") else {}
    raw = raw_config(family, TAPS, 1, block_size=5, **fields)
    tensors = random_tensors(raw)
    reference = Reference(raw, tensors, family not in SHIFTED, [FULL])
    head = load(tmp_path, raw, tensors)
    tokens, taps = text()
    logits = 3 * torch.randn(2, LENGTH, VOCAB, generator=torch.Generator().manual_seed(5))
    probabilities = target = logits.softmax(-1)
    given = DenseTarget(logits)
    if top is not None:
        best = probabilities.topk(top)
        given = TopTarget(best.indices, best.values)
        target = torch.zeros_like(probabilities).scatter(-1, best.indices, best.values)

    def entropy(wanted, scores) -> float:
        log_p = scores.double().log_softmax(-1)
        return -float((wanted * log_p)[wanted > 0].sum())

    def of_slot(hidden, path, wanted, following) -> float:
        scores = reference.next_logits(hidden, path)
        if family == "dflash2":
            kept = scores.isfinite()
            own = entropy(wanted, reference.logits(hidden)[len(path) - 1])
            return own + entropy(wanted[kept], scores[kept])
        loss = entropy(wanted, scores)
        if family.startswith("dspark"):
            sure = reference.confidence(hidden, path)
            right = int(scores.argmax()) == following
            loss -= 0.5 * float(torch.tensor(sure if right else 1 - sure, dtype=torch.float64).log())
        return loss

    losses = {"dflash": BlockLoss(head, 0.8), "dflash2": LatticeLoss(head, 0.8)}
    loss = losses.get(family) or MarkovLoss(head, 0.8, 0.5)
    with torch.no_grad():
        measured = float(loss(tokens, taps, given, None, ANCHORS))
    assert measured == pytest.approx(expected_loss(reference, target, 0.8, of_slot), rel=1e-4)


def test_what_is_not_to_be_learnt_counts_nothing(verifier, tmp_path):
    head, kind, config, _ = trained(verifier, tmp_path, "dspark")
    other, parallel_kind, parallel_config, _ = trained(verifier, tmp_path, "p-eagle")
    tokens, taps = text()
    target = DenseTarget(torch.randn(2, LENGTH, VOCAB, generator=torch.Generator().manual_seed(5)))
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    for loss in (kind.loss(head, config), parallel_kind.loss(other, parallel_config)):
        assert float(loss(tokens, taps, target, mask, ANCHORS).detach()) == 0.0
        # Row 1's first block alone predicts the token at 3 first.
        mask[1, 3] = True
        assert float(loss(tokens, taps, target, mask, ANCHORS).detach()) > 0.0
        mask[1, 3] = False


def test_every_pair_of_a_parallel_head_learns_and_masked_slots_behind_some(verifier, tmp_path):
    head, *_ = trained(verifier, tmp_path, "p-eagle")
    tokens, taps = text()
    wanted = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    target = TopTarget(wanted[..., None], torch.ones(2, LENGTH, 1))
    with torch.no_grad():
        measured = float(ParallelLoss(head, 3, 0.5)(tokens, taps, target, None, ANCHORS))
        pairs, slots = parallel_states(head, tokens, taps, ANCHORS, 3)
        first = F.cross_entropy(head.logits(pairs[:, :-1]).flatten(0, 1), wanted[:, 1:-1].flatten())
        total = float(first)
        for depth in (1, 2):
            rows = wanted.gather(1, ANCHORS + depth).flatten()
            total += 0.5**depth * float(F.cross_entropy(head.logits(slots[:, :, depth - 1]).flatten(0, 1), rows))
    assert measured == pytest.approx(total / 1.75, rel=1e-5)


def test_blocks_begin_where_there_is_something_to_learn_and_fit_the_text():
    learnt = torch.ones(4, 20, dtype=torch.bool)
    learnt[1, :15] = False
    drawn = draw_anchors(0, 3, range(4), learnt, 5, 4)
    assert drawn.shape == (4, 4)
    assert drawn.min() >= 1
    assert drawn.max() <= 14
    assert set(drawn[1].tolist()) >= {14}  # the only one behind which a token is learnt first
    parts = [draw_anchors(0, 3, range(i, i + 2), learnt[i : i + 2], 5, 4) for i in (0, 2)]
    assert torch.equal(torch.cat(parts), drawn)
    assert not torch.equal(draw_anchors(0, 4, range(4), learnt, 5, 4), drawn)
    assert torch.equal(draw_anchors(0, 3, range(1), learnt[:1], 5, 99), torch.arange(1, 15)[None])
