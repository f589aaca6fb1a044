"""An EAGLE-1 head through the whole engine: it reads the final norm's output, and the text is the verifier's own."""

import pytest
import torch

from tests.runtime.models import (
    CHAIN,
    engine_config,
    generate,
    greedy_params,
    random_model,
    random_prompts,
    reference,
)
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.verifier.layers.linears import dense_weight
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.few(2)

NUM_NEW = 48


def fields(loaded, **changes):
    return (
        dict(
            hidden_size=loaded.hidden_size,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            target_hidden_size=loaded.hidden_size,
            tap_layers=(len(loaded.layers),),
            vocab_size=loaded.vocab_size,
            draft_vocab_size=loaded.vocab_size,
            fc_bias=True,
        )
        | changes
    )


def random_head(loaded):
    """An EAGLE-1 head with random weights and the verifier's embedding and output matrix."""
    torch.manual_seed(4)
    head = Eagle1Head(Eagle1HeadConfig(**fields(loaded)))
    with torch.no_grad():
        head.embed_tokens.weight.copy_(loaded.model.get_input_embeddings().weight)
        head.lm_head.weight.copy_(loaded.model.get_output_embeddings().weight)
    return head


class Listening(EagleDrafter):
    """An EAGLE drafter that records the taps of every prompt chunk and decode, by slot and position."""

    def answer(self, end, outcome):
        """Decline C++ rounds, so that every round arrives in `draft`."""
        return False

    def draft(self, batch):
        self.heard = getattr(self, "heard", {})
        taken = 0
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            self._hear(slot, start, batch.chunk_taps[taken : taken + length])
            taken += length
        for row, slot in enumerate(batch.decode_slots.tolist()):
            count = int(batch.decode_num_tokens[row])
            self._hear(slot, int(batch.decode_positions[row]), batch.decode_taps[row, :count])
        return super().draft(batch)

    def _hear(self, slot, start, taps):
        for offset, tap in enumerate(taps):
            self.heard.setdefault(slot, {})[start + offset] = tap.clone()


@pytest.mark.slow
def test_it_is_given_the_final_norms_output():
    ref = reference("llama", NUM_NEW)
    drafter = Listening(random_head(ref.loaded), CHAIN)
    tokens, _ = generate(ref.loaded, engine_config(CHAIN), drafter, ref.prompts[1:2], greedy_params(NUM_NEW))
    sequence = torch.tensor([ref.prompts[1] + tokens[0]])
    model = ref.loaded.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        states = model.model(sequence).last_hidden_state[0]
    model.set_attn_implementation(before)
    (heard,) = drafter.heard.values()
    # Hidden states of the last tokens are never sent, because the request ends there.
    assert len(heard) >= sequence.shape[1] - CHAIN.max_path
    for position, tap in heard.items():
        torch.testing.assert_close(tap, states[position], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size=32 of an EAGLE-1 head differs from the target's 64"),
        ({"draft_vocab_size": 40}, "draft_vocab_size=40: an EAGLE-1 head drafts all 97"),
        ({"tap_layers": (1, 2)}, "an EAGLE-1 head has one tap"),
    ],
)
def test_what_no_eagle1_head_has_is_refused_by_field(changes, message):
    loaded = reference("llama", NUM_NEW).loaded
    with pytest.raises(ValueError, match=message):
        Eagle1HeadConfig(**fields(loaded, **changes))


def test_it_can_be_read_in_one_way_only():
    head = random_head(reference("llama", NUM_NEW).loaded)
    assert head.with_convention(head.convention).convention == head.convention
    with pytest.raises(ValueError, match="can only be read as"):
        head.with_convention(head.convention._replace(norm_output=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True], ids=["own-output", "tied"])
def test_a_folder_with_an_eagle1_head_is_a_drafter(tied, tmp_path):
    """Tensors that the published file leaves out are read from the verifier's folder."""
    model = random_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "verifier")
    loaded = prepare_model(model, "llama")
    save_eagle_head(random_head(loaded), tmp_path / "head", with_embedding=False)
    target = TargetDescription.from_checkpoint(tmp_path / "verifier")
    drafter = load_drafter(tmp_path / "head", target, CHAIN)
    assert drafter.needs.tap_layers == (len(loaded.layers),)
    assert torch.equal(drafter.head.lm_head.weight, dense_weight(model.get_output_embeddings()))
    assert torch.equal(drafter.head.embed_tokens.weight, model.get_input_embeddings().weight)
    prompts = random_prompts((7, 12))
    params = greedy_params(NUM_NEW)
    spoken, _ = generate(loaded, engine_config(CHAIN), drafter, prompts, params)
    plain, _ = generate(loaded, engine_config(CHAIN), None, prompts, params)
    assert spoken == plain
