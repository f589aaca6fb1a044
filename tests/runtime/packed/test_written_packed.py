"""Plain weights that a trainer writes into packed ones: the text is that of the numbers to which they were rounded."""

import pytest
import torch

from tests.runtime.models import engine_config, generate, greedy, greedy_params, random_prompts
from tests.runtime.quantised.test_checkpoints import CASES, CPU, save_quantised
from tests.runtime.rollouts.test_served_weights import moved
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused
from wingbeat.runtime.rollouts.update import WeightUpdate
from wingbeat.runtime.verifier.loading.loader import load_model

pytest.importorskip("gguf")
from tests.runtime.quantised.gguf_architectures import write_architecture
from tests.runtime.quantised.gguf_world import write_model

NUM_TOKENS = 16


def model_folder(path, kind):
    if kind in CASES:
        save_quantised(path, *CASES[kind])
        return path
    write_model(path / "tiny.gguf", kind, tied=kind == "Q8_0")
    return checkpoint_folder(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "fp8", "awq"])
def test_text_is_that_of_the_numbers_that_were_written(tmp_path, kind):
    folder = model_folder(tmp_path, kind)
    loaded = load_model(folder, torch.float32, CPU)
    twin = load_model(folder, torch.float32, CPU, packed=False).model
    prompts = random_prompts((5, 23, 70), loaded.vocab_size)
    params = [greedy_params(NUM_TOKENS)] * len(prompts)
    old = generate(loaded, engine_config(), None, prompts, params)[0]
    update = WeightUpdate(ServedWeights(loaded), keeps_journal=True)
    before = update.weights.checksums()
    new = {name: value.detach() for name, value in moved(twin).named_parameters()}

    update.start()
    update.write(new.items)
    update.abandon()  # halfway, with a journal
    assert update.weights.checksums() == before
    assert generate(loaded, engine_config(), None, prompts, params)[0] == old

    update.start()
    update.write(new.items)
    update.finish()
    written = {name: update.weights.read(update.weights.same(name)).clone() for name in new}
    coarse = 0.2 if kind in ("Q4_0", "awq") else 0.07
    for name, value in new.items():
        assert (written[name] - value).abs().max() <= coarse * value.abs().max(), name
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(written[name])
    text = greedy(twin, prompts, NUM_TOKENS)[0]
    assert text != old
    assert generate(loaded, engine_config(), None, prompts, params)[0] == text


@pytest.mark.parametrize(("form", "reason"), [("Q4_K", "minima"), ("Q6_K", "uint6")])
def test_forms_that_take_no_plain_weights_are_refused_by_name(tmp_path, form, reason):
    write_model(tmp_path / "tiny.gguf", form)
    loaded = load_model(checkpoint_folder(tmp_path), torch.float32, CPU)
    with pytest.raises(WeightsRefused, match=rf"^model\..* cannot be replaced: .*{reason}"):
        ServedWeights(loaded)


def test_packed_experts_are_refused_by_name(tmp_path):
    write_architecture(tmp_path / "tiny.gguf", "qwen3moe", "Q8_0")
    loaded = load_model(checkpoint_folder(tmp_path), torch.float32, CPU)
    with pytest.raises(WeightsRefused, match=r"experts.* cannot be replaced: packed as in the checkpoint"):
        ServedWeights(loaded)
