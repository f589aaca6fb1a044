"""Sampling through the engine: speculation changes no token, and tokens follow the model's own distribution."""

import pytest
import torch

from tests.runtime.models import (
    CHAIN,
    TREE,
    eagle_drafter,
    engine_config,
    generate,
    random_model,
    reference,
    softmax,
)
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.few(1)

LENGTH = 40
KINDS = {"T0.7": (0.7, 1.0), "T1": (1.0, 1.0), "T1-p0.9": (1.0, 0.9)}


def sampled(temperature, top_p=1.0, seed=0, max_tokens=LENGTH, speculation=True):
    return SamplingParams(max_tokens, temperature, top_p, seed=seed, ignore_eos=True, speculation=speculation)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_speculation_changes_no_token(model, kind):
    ref = reference(model)
    params = [sampled(*KINDS[kind], seed=seed) for seed in range(8)]
    plain, _ = generate(ref.loaded, engine_config(), None, ref.prompts, params)
    for speculation in (CHAIN, TREE):
        drafter = eagle_drafter(ref.loaded, speculation)
        tokens, engine = generate(ref.loaded, engine_config(speculation), drafter, ref.prompts, params)
        assert tokens == plain
        assert engine.speculation.num_drafts > 0
    # A drafter that knows the sampled text: long accepted paths, all of them moved.
    sequences = [prompt + more for prompt, more in zip(ref.prompts, plain, strict=True)]
    told = ScriptedDrafter(sequences, right_tree, ref.loaded.vocab_size)
    tokens, engine = generate(ref.loaded, engine_config(), told, ref.prompts, params)
    assert tokens == plain
    assert engine.speculation.acceptance_length > 5


def test_seeds_matter_and_neighbours_do_not():
    ref = reference("llama")
    prompts, params = [ref.prompts[0]] * 4, [sampled(1.0, seed=seed) for seed in (1, 2, 1, 1 << 33)]
    tokens, _ = generate(ref.loaded, engine_config(), eagle_drafter(ref.loaded, TREE), prompts, params)
    assert tokens[0] == tokens[2]
    assert len({tuple(row) for row in tokens}) == 3
    alone, _ = generate(ref.loaded, engine_config(max_num_seqs=1), None, prompts[:1], params[:1])
    assert alone[0] == tokens[0]


def exact_marginals(model, prompt, temperature, count):
    """float64 [count, vocab_size]: distribution of the first `count` sampled tokens, summed over all beginnings."""
    vocab_size = model.config.vocab_size
    model.set_attn_implementation("eager")
    paths, weights, marginals = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64), []
    for _ in range(count):
        with torch.no_grad():
            probs = softmax(model(paths, use_cache=False).logits[:, -1] / temperature) * weights[:, None]
        marginals.append(probs.sum(0))
        tokens = torch.arange(vocab_size).repeat(len(paths))[:, None]
        paths, weights = torch.cat([paths.repeat_interleave(vocab_size, 0), tokens], 1), probs.flatten()
    return torch.stack(marginals)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_distribution(temperature):
    """Chi-square with 9 degrees of freedom: 33.7 is exceeded by one fair sample in 10,000; the seeds are fixed."""
    model = random_model("llama", vocab_size=10, initializer_range=0.15)
    prompt, num_samples = [3, 1, 4, 1, 5], 2048
    expected = exact_marginals(model, prompt, temperature, 3) * num_samples
    # Neither uniform nor a point mass, and every cell large enough for the chi-square approximation.
    assert expected.min() > 5
    assert expected.max() > 2 * num_samples / 10
    loaded = prepare_model(model, "ten tokens")
    prompts = [prompt] * num_samples
    config = engine_config(max_num_seqs=512, max_model_len=32, max_num_batched_tokens=4096, num_kv_blocks=2048)
    tokens = {}
    for speculation in (True, False):
        params = [sampled(temperature, seed=seed, max_tokens=3, speculation=speculation) for seed in range(num_samples)]
        tokens[speculation], engine = generate(loaded, config, eagle_drafter(loaded, TREE), prompts, params)
        assert (engine.speculation.num_accepted_tokens > num_samples / 4) == speculation
    assert tokens[True] == tokens[False]
    drawn = torch.tensor(tokens[True])
    counts = torch.stack([torch.bincount(column, minlength=10) for column in drawn.T])
    chi_square = ((counts - expected) ** 2 / expected).sum(dim=1)
    assert chi_square.max() < 33.7
