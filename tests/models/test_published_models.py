"""Two published models, in every dtype: `make test-models` fetches them; without them all of this is skipped."""

from functools import cache

import pytest
import torch

from tests.models.published import GEMMA, MODELS, Published
from tests.needs import needs
from tests.runtime.models import CHAIN, TREE, engine_config, generate, greedy, greedy_params
from tests.runtime.scripted import ScriptedDrafter, right_chain, right_tree
from tests.runtime.text_drafters import text_drafter
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.checkpoints.checkpoint import load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import load_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

pytestmark = pytest.mark.slow
_THINGS = (
    "France",
    "a lighthouse",
    "the first railway",
    "bread",
    "a prime number",
    "the moon",
    "a linked list",
    "Shakespeare",
    "a volcano",
    "the human heart",
)
_BEGINNINGS = (
    "The history of {} begins with",
    "# Notes on {}\n\n1.",
    "Question: What is special about {}?\nAnswer:",
    'def describe():\n    """Say something of {}."""\n    return',
    "Once upon a time somebody wrote a letter on {}:",
)
PROMPTS = [beginning.format(thing) for beginning in _BEGINNINGS for thing in _THINGS]
DTYPES = [pytest.param(getattr(torch, name), id=name) for name in ("float32", "bfloat16", "float16")]
HERE = [pytest.param(model, id=model.name) for model in MODELS]
NUM_TOKENS = 64


@pytest.fixture(autouse=True)
def is_here(model: Published) -> None:
    """Skips a model that is not there."""
    if not model.is_here:
        pytest.skip(f"{model.folder} is not there: make test-models fetches it")


@cache
def prompts_of(model: Published) -> list[list[int]]:
    """Fifty prompts in a model's tokens."""
    tokenizer = Tokenizer.load(model.folder)
    return [tokenizer.encode(text) for text in PROMPTS]


def loaded_in(model: Published, dtype: torch.dtype) -> LoadedModel:
    """A model as it is served; skips what float16 does not hold, which is one line."""
    try:
        return load_model(model.folder, dtype, torch.device("cpu"))
    except UnsupportedModelError as error:
        if (model, dtype) != (GEMMA, torch.float16):
            raise
        line = str(error)
    assert "its activations do not fit float16" in line
    assert "\n" not in line
    pytest.skip(line)


@pytest.mark.parametrize("model", HERE)
def test_text_in_float32_is_that_of_transformers(model):
    prompts = prompts_of(model)
    loaded = load_model(model.folder, torch.float32, torch.device("cpu"))
    written = generate(loaded, engine_config(TREE), None, prompts, greedy_params(NUM_TOKENS))[0]
    del loaded
    plain = load_weights(ConfigFile.read(model.folder), torch.float32).eval()
    for index, (prompt, tokens) in enumerate(zip(prompts, written, strict=True)):
        # Alone: transformers' padding moves the logits by more than two tokens may be apart.
        assert tokens == greedy(plain, [prompt], NUM_TOKENS)[0][0], PROMPTS[index]


@needs("quantised")
@pytest.mark.parametrize("model", HERE)
def test_the_packed_file_writes_what_its_numbers_in_float32_write(model):
    tokenizer, prompts = Tokenizer.load(checkpoint_folder(model.gguf)), prompts_of(model)
    assert [tokenizer.encode(text) for text in PROMPTS] == prompts
    params = greedy_params(NUM_TOKENS)
    whole = load_model(model.folder, torch.float32, torch.device("cpu"))
    expected = generate(whole, engine_config(TREE), None, prompts, params)[0]
    del whole
    packed = load_model(checkpoint_folder(model.gguf), torch.float32, torch.device("cpu"))
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    for drafter in (None, ScriptedDrafter(sequences, right_tree, packed.vocab_size)):
        written = generate(packed, engine_config(TREE), drafter, prompts, params)[0]
        assert [text for text, *both in zip(PROMPTS, written, expected, strict=True) if both[0] != both[1]] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", HERE)
def test_text_with_speculation_is_that_without(model, dtype):
    prompts = prompts_of(model)[::6]
    loaded = loaded_in(model, dtype)
    assert loaded.dtype == dtype
    params = greedy_params(NUM_TOKENS if dtype == torch.float32 else 16)
    off = generate(loaded, engine_config(TREE), None, prompts, params)[0]
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(prompts, off, strict=True)]
    drafters = {
        "tree": (TREE, ScriptedDrafter(sequences, right_tree, loaded.vocab_size)),
        "chain": (CHAIN, ScriptedDrafter(sequences, right_chain, loaded.vocab_size)),
        **{name: (TREE, text_drafter(name, TREE)) for name in TEXT_DRAFTERS},
    }
    for name, (speculation, drafter) in drafters.items():
        on, engine = generate(loaded, engine_config(speculation), drafter, prompts, params)
        assert on == off, name
        assert name in TEXT_DRAFTERS or engine.speculation.num_accepted_tokens > len(prompts) * 8
