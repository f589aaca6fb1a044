"""Training an MTP module: what is trained is what the drafter runs, and the verifier beside it stays as it was."""

import json

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from tests.runtime.training_world import NUM_LAYERS, VOCAB, losses, make_corpus, make_verifier, short_run
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.unroll import unroll
from wingbeat.runtime.mtp.mtp_loader import load_mtp_modules, num_mtp_modules
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.training.drafter import train_drafter
from wingbeat.runtime.training.mtp.mtp_head import MODULE_FILE, MtpHead, save_mtp_module
from wingbeat.runtime.training.verifier_weights import weights_of_checkpoint


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    make_verifier(root)
    make_corpus(root)
    return root


@pytest.fixture
def head(world):
    """A module that has moved away from where it starts, in numbers that bfloat16 holds."""
    head = MtpHead(weights_of_checkpoint(TargetDescription.from_checkpoint(world / "verifier")), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        if parameter.requires_grad:
            moved = parameter.detach() + 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(moved.bfloat16())
    return head


@torch.no_grad()
def test_the_unrolled_module_is_the_module_that_drafts(world, head, tmp_path):
    save_mtp_module(head, world / "verifier", tmp_path / "out")
    modules = load_mtp_modules(TargetDescription.from_checkpoint(tmp_path / "out"))
    # The modules' configuration says whose attention they run: transformers' own, with a mask.
    modules.config._attn_implementation = "eager"
    tokens = torch.randint(VOCAB, (2, 14), generator=torch.Generator().manual_seed(2))
    hidden = FrozenVerifier(str(world / "verifier"), (NUM_LAYERS,), "cpu", torch.float32).observe(tokens).taps
    steps = [step.logits for step in unroll(head, tokens, hidden, 3)]
    module, num_chains = modules.items[0], 14 - 3 - 1
    for row in range(2):
        for start in (0, 4, num_chains - 1):
            # Rows 0..start are true; every further one has the module's own result as its hidden state.
            features = hidden[row, : start + 1]
            for depth in range(3):
                length = start + 1 + depth
                positions = torch.arange(1, length + 1)
                mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
                rotary = modules.rotary(features[None], positions[None])
                out = module(tokens[row, 1 : length + 1], features, positions, rotary, attention_mask=mask)
                torch.testing.assert_close(steps[depth][row, start], module.logits(out[-1]), rtol=1e-4, atol=1e-4)
                features = torch.cat([features, out[-1:]])


@torch.no_grad()
def test_the_verifier_beside_the_module_is_unchanged(world, head, tmp_path):
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(2))
    save_mtp_module(head, world / "verifier", tmp_path / "out")
    # Again, as at every checkpoint.
    save_mtp_module(head, world / "verifier", tmp_path / "out")
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (world / "verifier", tmp_path / "out"))
    assert torch.equal(after(tokens).logits, before(tokens).logits)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert num_mtp_modules(TargetDescription.from_checkpoint(tmp_path / "out")) == 1
    assert num_mtp_modules(TargetDescription.from_checkpoint(world / "verifier")) == 0
    assert not (world / "verifier" / MODULE_FILE).exists()


@pytest.mark.slow
def test_only_the_module_is_trained(world, tmp_path):
    config = short_run(world, tmp_path / "out", family="mtp", steps=40)
    train_drafter(config)
    assert sum(losses(config)[-5:]) < sum(losses(config)[:5])
    # Another run of it finds its module, and nothing to do.
    with pytest.raises(ValueError, match="has MTP modules already"):
        train_drafter(short_run(world, tmp_path / "again", family="mtp", verifier=str(config.output)))
    head = MtpHead(weights_of_checkpoint(TargetDescription.from_checkpoint(world / "verifier")), seed=0)
    frozen = {name for name, parameter in head.named_parameters() if not parameter.requires_grad}
    assert frozen == {"module.embedding", "module.head"}
    assert not head.embed_tokens.weight.requires_grad
    assert not head.lm_head.weight.requires_grad


def test_a_verifier_whose_last_layer_has_other_names_is_refused(world):
    weights = weights_of_checkpoint(TargetDescription.from_checkpoint(world / "verifier"))
    others = {name.replace("mlp.", "experts.0."): tensor for name, tensor in weights.last_layer.items()}
    with pytest.raises(ValueError, match=r"the verifier's last layer has no mlp\.down_proj\.weight"):
        MtpHead(weights._replace(last_layer=others), seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tap_layers": (1,)}, "mtp has one tap"),
        ({"layout": "specforge"}, "layout='specforge': family='mtp' does not have this setting"),
        ({"intermediate_size": 8}, "intermediate_size='8': family='mtp' does not have this setting"),
        ({"output": None}, "is the verifier's folder"),
    ],
)
def test_settings_that_a_module_lacks_are_refused(world, fields, message):
    output = fields.pop("output", world / "out") or world / "verifier"
    with pytest.raises(ValidationError, match=message):
        short_run(world, output, family="mtp", **fields)
