"""Files of one-pass heads: every tensor is used, what they leave out is the verifier's, all tools' names are read."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.runtime.models import CHAIN
from tests.runtime.one_pass.one_pass_drafts import FULL, TAPS, TARGET, fed, load, trees_of
from tests.runtime.one_pass.one_pass_world import (
    HEADS,
    HIDDEN,
    MASK,
    VOCAB,
    Reference,
    random_tensors,
    raw_config,
    save_head,
)
from tests.runtime.one_pass.parallel_eagle_world import parallel_config, parallel_tensors
from wingbeat.runtime.heads.files import CheckpointError
from wingbeat.runtime.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import load_parallel_head


def drafted(head):
    return trees_of(*fed(head, CHAIN))


def same(tree, expected):
    assert torch.equal(tree.token_ids, expected.token_ids)
    torch.testing.assert_close(tree.scores, expected.scores, atol=1e-5, rtol=0)


def renamed(tensors, *pairs):
    for old, new in pairs:
        tensors = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in tensors.items()}
    return tensors


@pytest.mark.parametrize("tool", ["prefixed", "encoder", "midlayer", "bare markov names"])
def test_the_names_of_every_tool_are_read(tmp_path, tool):
    raw = raw_config("dspark-vanilla", TAPS, 1)
    tensors = random_tensors(raw)
    expected = drafted(load(tmp_path / "plain", raw, tensors))
    others = {
        "prefixed": {f"model.{name}": tensor for name, tensor in tensors.items()},
        "encoder": renamed(tensors, ("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc.")),
        "midlayer": renamed(tensors, ("layers.0.", "midlayer.")),
        "bare markov names": renamed(tensors, ("markov_head.", "")),
    }
    same(drafted(load(tmp_path / "other", raw, others[tool])), expected)


def test_parameters_that_a_trainer_held_as_embeddings_are_read(tmp_path):
    raw = raw_config("dflash2", TAPS, 1)
    tensors = random_tensors(raw)
    expected = drafted(load(tmp_path / "plain", raw, tensors))
    books = [(f"candidate_selector.{kind}_codebook",) * 2 for kind in ("predecessor", "successor")]
    other = renamed(tensors, *((old, f"{new}.weight") for old, new in books))
    assert other.keys() != tensors.keys()
    same(drafted(load(tmp_path / "other", raw, other)), expected)


def test_what_the_file_leaves_out_is_the_verifiers(tmp_path):
    raw = raw_config("dflash", TAPS, 1)
    tensors = random_tensors(raw)
    expected = drafted(load(tmp_path / "own", raw, tensors))
    lent = {name: tensors.pop(f"{name}.weight") for name in ("embed_tokens", "lm_head")}
    target = SimpleNamespace(
        **vars(TARGET) | {"embedding": lambda: lent["embed_tokens"], "lm_head": lambda: lent["lm_head"]}
    )
    checkpoint = read_one_pass_checkpoint(save_head(tmp_path / "lent", raw, tensors))
    same(drafted(load_one_pass_head(checkpoint, target, torch.float32, "cpu")), expected)
    with pytest.raises(CheckpointError, match=r"missing tensor embed_tokens\.weight"):
        load_one_pass_head(checkpoint, TARGET, torch.float32, "cpu")


@pytest.mark.parametrize("family", ["dflash", "dspark-vanilla", "dflash2"])
def test_a_smaller_draft_vocabulary_leads_to_the_verifiers_tokens(tmp_path, family):
    """Every other token: a head over all of them that may draft no other drafts the same."""
    raw = raw_config(family, TAPS, 1)
    tensors = random_tensors(raw)
    size = VOCAB // 2
    small = dict(tensors) | {
        "lm_head.weight": tensors["lm_head.weight"][: 2 * size : 2].clone(),
        "d2t": torch.arange(size),
    }
    if family == "dspark-vanilla":
        small["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][: 2 * size : 2].clone()
    head = load(tmp_path, raw | {"draft_vocab_size": size}, small)
    drafter, world = fed(head, CHAIN)
    tree = trees_of(drafter, world)
    reference = Reference(raw, tensors, family != "dspark-vanilla", [FULL])
    reference.logits = lambda hidden: (hidden @ tensors["lm_head.weight"].T).index_fill(
        1, torch.tensor([token for token in range(VOCAB) if token % 2 or token >= 2 * size]), float("-inf")
    )
    for row, slot in enumerate(world.slots):
        length = int(world.lens[slot])
        path = [int(world.tokens[slot, length - 1])]
        hidden = reference.hidden(world.taps[slot, : length - 1], path[0])
        for _ in range(CHAIN.draft_steps):
            path.append(int(reference.next_logits(hidden, path).argmax()))
        assert tree.token_ids[row].tolist() == path


def test_masked_slots_may_have_a_vector_of_their_own(tmp_path):
    """The vector takes precedence over the token that the config names."""
    raw = raw_config("dflash", TAPS, 1, mask_token_id=VOCAB + 70000)
    tensors = random_tensors(raw)
    with pytest.raises(CheckpointError, match="mask_token_id=70097 is outside the embedding of 97 rows"):
        load(tmp_path, raw, tensors)
    vector = torch.randn(HIDDEN)
    torch.save({"embedding": vector, "mask_token_id": VOCAB + 70000}, tmp_path / "mask_embedding.pt")
    tree = drafted(load(tmp_path, raw, tensors))
    other = dict(tensors) | {"embed_tokens.weight": tensors["embed_tokens.weight"].clone()}
    other["embed_tokens.weight"][MASK] = vector
    drafter, world = fed(load(tmp_path / "row", raw | {"mask_token_id": MASK}, other), CHAIN)
    real = world.tokens.gather(1, (world.lens - 1)[:, None])[world.slots, 0] != MASK
    assert bool(real.all())
    same(tree, trees_of(drafter, world))


def test_what_scales_values_and_logits_is_heeded(tmp_path):
    raw = raw_config("dflash", TAPS, 2)
    tensors = random_tensors(raw)
    own = {"attention_value_scale": 0.5, "input_embedding_scale": 2.0, "output_multiplier": 0.25}
    tree = drafted(load(tmp_path / "scaled", raw | {"dflash_config": own, "final_logit_softcapping": 3.0}, tensors))
    by_hand = dict(tensors) | {"embed_tokens.weight": tensors["embed_tokens.weight"] * 2}
    by_hand |= {name: t * 0.5 for name, t in tensors.items() if name.endswith("v_proj.weight")}
    _, world = fed(load(tmp_path / "plain", raw, by_hand), CHAIN)
    reference = Reference(raw, by_hand, True, [FULL] * 2)
    for row, slot in enumerate(world.slots):
        length = int(world.lens[slot])
        logits = reference.logits(reference.hidden(world.taps[slot, : length - 1], int(world.tokens[slot, length - 1])))
        capped = 3 * torch.tanh(logits * 0.25 / 3)
        best = capped.log_softmax(-1).max(-1)
        assert tree.token_ids[row, 1:].tolist() == best.indices[: CHAIN.draft_steps].tolist()
        torch.testing.assert_close(tree.scores[row, 1:], best.values[: CHAIN.draft_steps].cumsum(0), atol=1e-5, rtol=0)


def test_biases_and_sinks_are_read(tmp_path):
    """A sink that outweighs every key leaves the bias of the projection behind attention alone."""
    raw = raw_config("dflash", TAPS, 1, attention_bias=True, dflash_config={"attention_sink_bias": True})
    tensors = random_tensors(raw)
    layer = "layers.0.self_attn."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"{layer}{name}.bias"] = torch.randn(len(tensors[f"{layer}{name}.weight"]))
    tensors[f"{layer}attention_sink_bias"] = torch.full((HEADS,), 1e4)
    loud = drafted(load(tmp_path / "loud", raw, tensors))
    silent = dict(tensors) | {f"{layer}o_proj.weight": torch.zeros_like(tensors[f"{layer}o_proj.weight"])}
    same(loud, drafted(load(tmp_path / "silent", raw, silent)))
    other = dict(silent) | {f"{layer}o_proj.bias": tensors[f"{layer}o_proj.bias"] + 1}
    assert not torch.equal(loud.scores, drafted(load(tmp_path / "other", raw, other)).scores)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("dflash", "layers.1.mlp.up_proj.weight", r"missing tensor layers\.1\.mlp\.up_proj\.weight"),
        ("dflash", "norm.weight", r"missing tensor norm\.weight"),
        ("dspark-gated", "markov_head.gate_proj.bias", r"missing tensor markov_head\.gate_proj\.bias"),
        ("dflash2", "layers.0.mlp_conv.base_kernel", r"missing tensor layers\.0\.mlp_conv\.base_kernel"),
        ("dflash2", "candidate_selector.successor_codebook", r"missing tensor candidate_selector\.successor_codebook"),
    ],
)
def test_a_tensor_that_is_missing_or_strange_is_named(tmp_path, family, name, message):
    raw = raw_config(family, TAPS, 2)
    tensors = random_tensors(raw)
    with pytest.raises(CheckpointError, match=r"unexpected tensor layers\.2\.strange"):
        load(tmp_path / "more", raw, tensors | {"layers.2.strange": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \(3,\), expected"):
        load(tmp_path / "other", raw, tensors | {name: torch.zeros(3)})
    del tensors[name]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "less", raw, tensors)


def test_a_vocabulary_of_another_verifier_is_refused(tmp_path):
    raw = raw_config("dflash", TAPS, 1)
    checkpoint = read_one_pass_checkpoint(save_head(tmp_path, raw, random_tensors(raw)))
    other = SimpleNamespace(**vars(TARGET) | {"vocab_size": 101})
    with pytest.raises(CheckpointError, match="vocab_size=97 differs from the target's 101"):
        load_one_pass_head(checkpoint, other, torch.float32, "cpu")


@pytest.mark.parametrize("nested", [False, True])
def test_p_eagle_is_read_from_flat_and_nested_configs(tmp_path, nested):
    raw = parallel_config((0, 3, 6), 3)
    tensors = parallel_tensors(raw)
    if nested:
        body = {name: raw.pop(name) for name in list(raw) if name not in ("eagle_aux_hidden_state_layer_ids",)}
        raw = {"speculators_model_type": "peagle", "mask_token_id": body.pop("ptd_token_id"), **raw}
        raw["transformer_layer_config"] = body | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    head = load_parallel_head(read_one_pass_checkpoint(tmp_path), TARGET, torch.float32, "cpu")
    assert (head.config.num_layers, head.mask_token_id, head.tap_layers) == (3, MASK, (0, 3, 6))
    assert not head.convention.norm_before_residual


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw, tensors: tensors.pop("mask_hidden"), "missing tensor mask_hidden"),
        (lambda raw, tensors: raw.pop("ptd_token_id"), "states no mask token"),
        (lambda raw, tensors: raw.update(ptd_token_id=97), "mask_token_id=97 is outside"),
        (lambda raw, tensors: raw.update(layer_types=["sliding_attention"]), "layer_types='sliding_attention'"),
        (lambda raw, tensors: tensors.pop("layers.1.mlp.up_proj.weight"), r"missing tensor layers\.1\.mlp\.up_proj"),
    ],
)
def test_a_p_eagle_head_that_cannot_be_read_says_why(tmp_path, edit, message):
    raw = parallel_config((0, 3, 6), 2)
    tensors = parallel_tensors(raw)
    edit(raw, tensors)
    checkpoint = read_one_pass_checkpoint(save_head(tmp_path, raw, tensors))
    with pytest.raises(CheckpointError, match=message):
        load_parallel_head(checkpoint, TARGET, torch.float32, "cpu")
