"""Families whose only class in transformers takes images are served for text."""

import pytest
import torch
from transformers import AutoConfig, Mistral3Config, Mistral3ForConditionalGeneration

from tests.runtime.models import SHAPE, Run, add_noise, engine_config, greedy, greedy_params, new_engine, random_prompts
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import auto_class
from wingbeat.runtime.verifier.loading.loader import load_model

VISION = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def test_the_text_of_mistral_3_is_that_of_generate(tmp_path):
    torch.manual_seed(0)
    text = AutoConfig.for_model("mistral", **SHAPE)
    config = Mistral3Config(text_config=text, vision_config=VISION, image_token_index=5)
    model = add_noise(Mistral3ForConditionalGeneration(config).eval())
    model.save_pretrained(tmp_path)
    prompts = random_prompts((11, 3))
    expected, _ = greedy(model, prompts, 8)
    engine = new_engine(load_model(tmp_path, torch.float32, torch.device("cpu")), engine_config())
    assert Run(engine, prompts, greedy_params(8)).finish() == expected


@pytest.mark.parametrize("kind", ["llama", "gemma3", "no_such_model"])
def test_other_families_are_built_by_the_class_for_text(kind):
    assert auto_class(kind).__name__ == "AutoModelForCausalLM"


def test_a_model_of_another_kind_is_refused_by_name(tmp_path):
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(ModelCheckpointError, match="is no causal LM that transformers knows"):
        load_model(tmp_path, torch.float32, torch.device("cpu"))
