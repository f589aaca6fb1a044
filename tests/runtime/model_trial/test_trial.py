"""The trial at load: what would be served wrongly is refused in one line, whatever makes it wrong."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Phi3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralAttention

from tests.runtime.by_torch import without_cpu
from tests.runtime.models import (
    TREE,
    WINDOW,
    engine_config,
    generate,
    greedy,
    greedy_params,
    prepare_model,
    random_model,
    random_prompts,
)
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.model_trial.reference import PARENTS, trial_texts
from wingbeat.runtime.verifier.layers import attention
from wingbeat.runtime.verifier_errors import UnsupportedModelError


def refusal(model):
    """The line that a model is refused with."""
    with pytest.raises(UnsupportedModelError) as caught:
        prepare_model(model, "x")
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{type(model).__name__}: ")
    return line


def test_positions_that_a_model_counts_by_itself_are_found(monkeypatch):
    original = LlamaModel.forward

    def counting(self, input_ids=None, position_ids=None, past_key_values=None, **kwargs):
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        position_ids = torch.arange(seen, seen + input_ids.shape[1])[None]
        return original(self, input_ids, position_ids=position_ids, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    assert "differ from transformers' own decoding" in refusal(random_model("llama"))


def test_rotation_that_depends_on_the_longest_sequence_of_a_batch_is_found(monkeypatch):
    original = LlamaRotaryEmbedding.forward

    def by_longest(self, x, position_ids):
        # Angles shrink once a sequence has more than 12 tokens, for all of the batch.
        return original(self, x, position_ids * (0.5 if int(position_ids.max()) > 12 else 1.0))

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", by_longest)
    assert "differ" in refusal(random_model("llama"))


def test_memory_of_the_token_before_is_found(monkeypatch):
    """A state beside attention that no cache class tells of."""
    original = LlamaAttention.forward

    def remembering(self, hidden_states, *args, **kwargs):
        return original(self, hidden_states + 0.1 * hidden_states.roll(1, dims=1), *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", remembering)
    assert "differ" in refusal(random_model("llama"))


@pytest.fixture
def without_kernels():
    """Attention by torch's operations, whose steps these tests take apart."""
    with without_cpu():
        yield


@pytest.mark.usefixtures("without_kernels")
def test_a_tree_read_as_a_chain_is_found(monkeypatch):
    """An attention function that is right in chunks and plain steps, and lets siblings see each other."""
    original = attention.attend_in_blocks

    def chains_only(query, keys, values, segments, *args, **kwargs):
        segments = [segment._replace(mask_words=None) for segment in segments]
        return original(query, keys, values, segments, *args, **kwargs)

    monkeypatch.setattr(attention, "attend_in_blocks", chains_only)
    assert "of a token tree differ" in refusal(random_model("llama"))


@pytest.mark.usefixtures("without_kernels")
def test_a_window_one_off_is_found(monkeypatch):
    original = attention.attend_segments

    def narrower(*args, sliding_window, **kwargs):
        return original(*args, sliding_window=max(sliding_window - 1, 0), **kwargs)

    model = random_model("mistral")
    monkeypatch.setattr(attention, "attend_segments", narrower)
    assert "differ" in refusal(model)


def test_a_window_that_only_the_mask_tells_is_served(monkeypatch):
    """Mistral's attention without its keyword, as models have it whose window is nowhere but in their masks."""
    code = MistralAttention.forward

    def silent(self, *args, **kwargs):
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return code(self, *args, **kwargs)
        finally:
            self.config.sliding_window = window

    monkeypatch.setattr(MistralAttention, "forward", silent)
    model = random_model("mistral")
    prompts = random_prompts((40, 9))
    expected = greedy(model, prompts, 12)[0]
    loaded = prepare_model(model, "mistral")
    assert loaded.windows == (WINDOW,)
    assert generate(loaded, engine_config(TREE), None, prompts, greedy_params(12))[0] == expected


def test_two_calls_in_a_layer_are_refused_with_their_number(monkeypatch):
    original = LlamaAttention.forward

    def twice(self, *args, **kwargs):
        if kwargs.get("past_key_values") is None:
            original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", twice)
    assert "layer 0 calls attention 2 times" in refusal(random_model("llama"))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [TypeError, AttributeError, IndexError, NotImplementedError, RuntimeError, KeyError])
@pytest.mark.parametrize("where", ["any", "trees"])
def test_an_error_of_any_kind_becomes_one_line_with_its_cause(monkeypatch, kind, where):
    original = LlamaModel.forward

    def failing(self, input_ids=None, position_ids=None, **kwargs):
        if where == "any" or (position_ids is not None and input_ids.shape[1] == 2 * len(PARENTS)):
            raise kind("no such thing\nand more")
        return original(self, input_ids, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", failing)
    line = refusal(random_model("llama"))
    assert kind.__name__ in line
    assert "no such thing" in line
    assert "wingbeat_" not in line


def test_running_out_of_memory_is_no_fault_of_the_architecture(monkeypatch):
    def full(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LlamaModel, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        prepare_model(random_model("llama"), "x")


def test_a_forward_without_positions_or_keywords_is_refused_for_that():
    class NoPositions(LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, use_cache=None, **kwargs):
            return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache, **kwargs)

    class NoKeywords(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, past_key_values=None, use_cache=None):
            return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values)

    config = random_model("llama").config
    assert "takes no position_ids" in refusal(NoPositions(config))
    assert "takes no further keywords" in refusal(NoKeywords(config))


def test_longrope_is_served_up_to_where_its_angles_change():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"pad_token_id": 0, "eos_token_id": 2, "vocab_size": 97}
    config = Phi3Config(
        **sizes, **tokens, max_position_embeddings=256, rope_parameters=rope, original_max_position_embeddings=64
    )
    torch.manual_seed(0)
    loaded = prepare_model(AutoModelForCausalLM.from_config(config), "phi3")
    assert loaded.max_position_embeddings == 64


@pytest.mark.slow
def test_half_precision_is_tried_within_its_own_rounding(monkeypatch):
    loaded = prepare_model(random_model("qwen3").to(torch.bfloat16), "qwen3")
    assert loaded.dtype == torch.bfloat16
    original = attention.attend_segments
    monkeypatch.setattr(attention, "attend_segments", lambda *args, **kwargs: original(*args, **kwargs) * 1.5)
    assert "differ" in refusal(random_model("qwen3").to(torch.bfloat16))


def test_trees_at_the_last_positions_of_learned_ones():
    """Nodes that stand past the table of positions are computed and never accepted."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    model = GPT2LMHeadModel(config).eval()
    prompts = random_prompts((30,))
    expected = greedy(model, prompts[:1], 34)[0][0]
    loaded = prepare_model(model, "gpt2")
    told = ScriptedDrafter([[*prompts[0], *expected, *[1] * 10]], right_tree, loaded.vocab_size)
    tokens, _ = generate(loaded, engine_config(TREE, max_model_len=64), told, prompts, greedy_params(34))
    assert tokens == [expected]


def test_texts_leave_short_windows_and_fit_the_positions():
    long, short = trial_texts({16, 40, 4096}, 512, 97)
    assert len(long.prompt) >= 60
    assert len(short.prompt) < len(long.prompt) - 4
    for text in trial_texts({16}, 20, 97):
        assert text.paths().shape[1] <= 20
    assert not set(trial_texts((), 512, 97, frozenset(range(50)))[0].prompt) & set(range(50))
