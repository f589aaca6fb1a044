"""Models of every architecture that is read from GGUF files answer as the model whose numbers they hold."""

import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGUFWriter

from tests.runtime.models import TREE, engine_config, generate, greedy, greedy_params, random_prompts
from tests.runtime.quantised.gguf_architectures import CASES, write_architecture
from tests.runtime.quantised.gguf_world import TOKENS, write_tokens
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.quantised.gguf_config import ARCHITECTURES
from wingbeat.runtime.tensor_files import ModelCheckpointError
from wingbeat.runtime.verifier.checkpoints.checkpoint import Place, load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile
from wingbeat.runtime.verifier.loading.loader import load_model

CPU = torch.device("cpu")
PROMPTS = random_prompts((5, 40), len(TOKENS))


def test_each_architecture_has_a_case():
    assert {architecture for architecture, _, _ in CASES.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_text_are_those_of_the_model(case, tmp_path):
    meant = write_architecture(tmp_path / "tiny.gguf", case)
    folder, ids = checkpoint_folder(tmp_path), torch.tensor([PROMPTS[1]])
    held = load_weights(ConfigFile.read(folder), torch.float32, Place(CPU, torch.float32))
    with torch.inference_mode():
        theirs, ours = meant(ids).logits, held(ids).logits
    assert float((theirs - ours).abs().max() / theirs.std()) < 2e-5
    found = generate(load_model(folder, torch.float32, CPU), engine_config(TREE), None, PROMPTS, greedy_params(16))[0]
    assert found == greedy(meant, PROMPTS, 16)[0]


def write_head(file, architecture, **fields):
    writer = GGUFWriter(str(file), architecture)
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64}
    for name, value in (sizes | {"attention.head_count": 4} | fields).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{architecture}.{name}", value)
    write_tokens(writer)
    writer.add_tensor("token_embd.weight", torch.zeros(len(TOKENS), 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "fields", "says"),
    [
        ("falcon", {}, r"tiny.gguf \(falcon\) is of an architecture that is not read: llama, "),
        ("llama", {"logit_scale": 2}, r"says llama.logit_scale = 2, which is not read"),
        ("llama", {"rope.dimension_count": 8}, "rotary angles of a part of each head are not read"),
        ("llama", {"rope.scaling.type": "longrope"}, "rotary positions scaled as 'longrope' are not read"),
        ("llama", {"attention.value_length": 8}, "keys and values are of unlike lengths"),
        ("llama", {"attention.head_count": 0}, "cannot be read: ZeroDivisionError"),
        ("llama", {"block_count": "many"}, "block_count is 'many', and no number"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, architecture, fields, says):
    write_head(tmp_path / "tiny.gguf", architecture, **fields)
    with pytest.raises(ModelCheckpointError, match=says):
        checkpoint_folder(tmp_path / "tiny.gguf")


def test_files_that_are_cut_or_changed_anywhere_are_refused_or_read(tmp_path):
    write_head(tmp_path / "whole.gguf", "llama")
    whole, chance = (tmp_path / "whole.gguf").read_bytes(), torch.Generator().manual_seed(0)
    file, said = tmp_path / "tiny.gguf", []
    for place in torch.randint(4, len(whole), (150,), generator=chance).tolist():
        for damaged in (whole[:place], whole[:place] + b"\xff" * 8 + whole[place + 8 :]):
            file.write_bytes(damaged)
            try:
                checkpoint_folder(file)
            except ModelCheckpointError as error:
                said.append(str(error))
    assert len(said) > 150
    assert not any("\n" in one for one in said)
