"""The trial in half precision: models that round much are served, and mistakes smaller than rounding are found."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.runtime.hybrids import needs_states, random_hybrid
from tests.runtime.models import (
    TREE,
    engine_config,
    generate,
    greedy_params,
    prepare_model,
    random_model,
    random_prompts,
)
from tests.runtime.trained_like import MODELS, trained_like
from wingbeat.runtime.model_trial import exact, model_trial, trial
from wingbeat.runtime.model_trial.exact import exact_copy, in_float32
from wingbeat.runtime.model_trial.reference import reference_logits, trial_texts
from wingbeat.runtime.round.rows import Rows, Segment
from wingbeat.runtime.verifier.layers import attention
from wingbeat.runtime.verifier.model import VerifierModel
from wingbeat.runtime.verifier_errors import UnsupportedModelError

HALVES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_models_with_the_statistics_of_trained_ones_are_served(name, dtype):
    loaded = prepare_model(trained_like(name, dtype), name)
    assert loaded.dtype == dtype
    tokens, _ = generate(loaded, engine_config(TREE), None, random_prompts((9, 20)), greedy_params(4))
    assert [len(written) for written in tokens] == [4, 4]


def of_trees(rows: Rows, change: Callable[[Segment], Segment]) -> Rows:
    """Rows whose segments with trees are changed."""
    return rows._replace(segments=[change(one) if one.mask_words is not None else one for one in rows.segments])


def sibling_seen(rows: Rows) -> Rows:
    def change(segment: Segment) -> Segment:
        words = segment.mask_words.clone()
        words[:, 2] |= 1 << 1
        return segment._replace(mask_words=words)

    return of_trees(rows, change)


def masks_one_row_late(rows: Rows) -> Rows:
    return of_trees(rows, lambda segment: segment._replace(mask_words=segment.mask_words.roll(1, dims=1)))


def rope_one_off_in_trees(rows: Rows) -> Rows:
    positions = rows.positions.clone()
    for segment in rows.segments:
        if segment.mask_words is not None:
            positions[..., segment.start : segment.start + segment.num_reqs * segment.num_query] += 1
    return rows._replace(positions=positions)


def rope_one_off_in_steps(rows: Rows) -> Rows:
    return rows._replace(positions=rows.positions + 1) if rows.positions.shape[-1] == 2 else rows


def keys_of_the_other_sequence(rows: Rows) -> Rows:
    return of_trees(rows, lambda segment: segment._replace(block_tables=segment.block_tables.flip(0)))


def keys_of_two_slots_exchanged(rows: Rows) -> Rows:
    slots = rows.slot_mapping.clone()
    slots[:2] = slots[:2].flip(0)
    return rows._replace(slot_mapping=slots)


def a_block_forgotten(rows: Rows) -> Rows:
    return rows._replace(
        segments=[one._replace(num_context=(one.num_context - 1).clamp_min(0)) for one in rows.segments]
    )


BATCHES = [
    sibling_seen,
    masks_one_row_late,
    rope_one_off_in_trees,
    rope_one_off_in_steps,
    keys_of_the_other_sequence,
    keys_of_two_slots_exchanged,
    a_block_forgotten,
]


def another_scale(query: Tensor, scaling: float, options: dict) -> tuple[Tensor, float, dict]:
    return query, 1.1 * scaling, options


def a_window_one_off(query: Tensor, scaling: float, options: dict) -> tuple[Tensor, float, dict]:
    window = options.get("sliding_window") or 0
    return query, scaling, options | {"sliding_window": window and window - 1}


def a_window_one_wider(query: Tensor, scaling: float, options: dict) -> tuple[Tensor, float, dict]:
    window = options.get("sliding_window") or 0
    return query, scaling, options | {"sliding_window": window and window + 1}


def one_head_exchanged(query: Tensor, scaling: float, options: dict) -> tuple[Tensor, float, dict]:
    order = torch.arange(query.shape[1])
    order[1], order[2] = 2, 1
    return query[:, order].contiguous(), scaling, options


ATTENTION = [another_scale, a_window_one_off, a_window_one_wider, one_head_exchanged]


def refusal(model) -> str:
    """The one line that a model is refused with."""
    with pytest.raises(UnsupportedModelError, match="its text would be wrong") as caught:
        prepare_model(model, "x")
    return str(caught.value)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["mistral-everything", "gemma3-outliers-tied", "moe-outliers"])
@pytest.mark.parametrize("mistake", BATCHES)
def test_a_mistake_in_a_batch_is_found(monkeypatch, mistake, name, dtype):
    forward = VerifierModel.forward
    model = trained_like(name, dtype)
    monkeypatch.setattr(VerifierModel, "forward", lambda self, rows: forward(self, mistake(rows)))
    refusal(model)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["mistral-everything", "gemma3-outliers-tied", "gpt-oss-outliers"])
@pytest.mark.parametrize("mistake", ATTENTION)
def test_a_mistake_in_attention_is_found(monkeypatch, mistake, name, dtype):
    original = attention.attend_segments

    def wrong(query, keys, values, segments, scaling, *, packed=None, **options):
        query, scaling, options = mistake(query, scaling, options)
        return original(query, keys, values, segments, scaling, packed=packed, **options)

    model = trained_like(name, dtype)
    monkeypatch.setattr(attention, "attend_segments", wrong)
    refusal(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_mistake_that_only_half_precision_has_is_found(monkeypatch, dtype):
    forward = VerifierModel.forward

    def wrong(self, rows):
        out = forward(self, rows)
        half = self.model.dtype != torch.float32
        return out._replace(logits=out.logits + 0.2 * out.logits.roll(1, -1)) if half else out

    model = random_model("qwen3").to(dtype)
    monkeypatch.setattr(VerifierModel, "forward", wrong)
    assert "transformers' in the same dtype" in refusal(model)


def test_passes_in_float32_are_those_of_the_same_weights_in_a_wider_model_and_leave_the_model_alone():
    model = trained_like("gemma3-outliers-tied", torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    token_ids = torch.arange(12)[None]
    whole, count = exact_copy(model, [None] * model.config.num_hidden_layers)
    assert count == model.config.num_hidden_layers
    with torch.inference_mode():
        expected = whole(token_ids, use_cache=False).logits
        with in_float32(model):
            found = model(token_ids, use_cache=False).logits
            layer = model.model.layers[0].self_attn.q_proj.weight
            assert layer.dtype == torch.bfloat16  # one layer at a time
    assert torch.equal(found, expected)
    assert found.dtype == torch.float32
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_pass_that_raises_leaves_no_weights_wide(monkeypatch):
    model = random_model("llama").to(torch.bfloat16)

    def failing(self, *args, **kwargs):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(type(model.model.layers[1].mlp), "forward", failing)
    with pytest.raises(RuntimeError, match="no such thing"), in_float32(model):
        model(torch.arange(3)[None])
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.model.layers)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_a_large_model_is_copied_up_to_the_first_layers_of_every_kind(monkeypatch, name):
    """A mistake in a late layer is left to the half-precision rows; every kind of layer is tried in float32."""
    monkeypatch.setattr(exact, "WHOLE_COPY_BYTES", 0)
    copied, copy_of = [], exact.exact_copy

    def counting(*args):
        made, count = copy_of(*args)
        copied.append(count)
        return made, count

    monkeypatch.setattr(model_trial, "exact_copy", counting)
    loaded = prepare_model(random_model(name).to(torch.bfloat16), name)
    windows = {layer.sliding_window for layer in loaded.layers}
    dense_first = name == "deepseek_v3"
    assert copied == [2 if len(windows) > 1 or dense_first else 1]
    assert loaded.model.config.num_hidden_layers == 4
    assert len(loaded.decoder_layers) == 4
    forward = VerifierModel.forward
    monkeypatch.setattr(VerifierModel, "forward", lambda self, rows: forward(self, sibling_seen(rows)))
    refusal(random_model(name).to(torch.bfloat16))


def test_activations_that_do_not_fit_float16_are_named_in_one_line():
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3e4)
    with pytest.raises(UnsupportedModelError, match="do not fit float16") as caught:
        prepare_model(model.to(torch.float16), "x")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("start with dtype bfloat16 or float32")


def test_rows_are_judged_by_the_median_and_by_transformers_own_rounding():
    def rows(own: float, theirs: float | None, count: int = 9, place: str = "in plain decoding") -> list[trial.Apart]:
        return [trial.Apart(place, own, theirs)] * count

    for right in (rows(0.9, 0.5), rows(0.1, 0.1) + rows(1.4, 0.1, count=3), rows(1e-5, None) + rows(5e-3, None, 3)):
        trial.check(right)
    for wrong in (rows(0.1, 0.01), rows(0.9, 0.1), rows(float("inf"), 0.5), rows(3e-3, None)):
        with pytest.raises(UnsupportedModelError, match="in plain decoding"):
            trial.check(wrong)
    with pytest.raises(UnsupportedModelError, match="in token trees"):
        trial.check(rows(0.9, 0.1, place="at depth 2 of a token tree"))


def test_references_of_half_precision_are_the_answer_in_float32():
    model = random_model("llama").to(torch.bfloat16)
    texts = trial_texts((), 512, 97)
    found = reference_logits(model, texts)
    exactly = reference_logits(exact_copy(model, [None] * 4)[0], texts)
    for one, other in zip(found, exactly, strict=True):
        torch.testing.assert_close(one.rows, other.rows, rtol=1e-4, atol=1e-4)
        assert len(one.rounding) == len(one.rows)
        assert 0 < max(one.rounding) < 0.1
        assert not other.rounding


@needs_states
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "bamba", "falcon_h1"])
def test_states_of_a_copy_in_float32_are_in_float32(name, dtype):
    """States in half precision would round what the copy computes."""
    assert prepare_model(random_hybrid(name).to(dtype), name).keeps_states
