"""Drafts by a model of another vocabulary: its own distribution over the shared tokens, and the verifier's text."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models.published import GEMMA, SMOLLM2
from tests.runtime.draft_world import MIXED, NUM_SLOTS, SHAPES, VOCAB, World, channel_spec
from tests.runtime.engine.test_sampling_lossless import exact_marginals
from tests.runtime.foreign_vocabulary.kinds import DRAFT_SIZE, foreign_vocabulary, shared
from tests.runtime.foreign_vocabulary.vocabularies import spelled
from tests.runtime.models import (
    CHAIN,
    DEMO_PAIR,
    DEMO_TEXTS,
    TREE,
    engine_config,
    generate,
    greedy_params,
    random_model,
    reference,
)
from tests.runtime.slow_growth import assert_tree, slow_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.draft_model.model_drafter import ModelDrafter
from wingbeat.runtime.foreign_vocabulary.intersection import Vocabulary
from wingbeat.runtime.heads.vocabulary import SharedTokens
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.few(1)

NUM_SHARED = 60
ENGLISH = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "Bread is baked by",
    "Write a Python function that adds two numbers.\n\ndef",
)
FIGURES = {
    ("demo", "smol"): (2.87, 1.49),
    ("smol", "gemma"): (1.86, 2.08),
    ("gemma", "smol"): (2.41, 1.78),
    ("smol", "demo"): (1.41, 1.26),
}
"""Tokens a round of published verifiers and draft models, greedy and at temperature 1."""


def renumbered(model: PreTrainedModel, rows: Tensor) -> PreTrainedModel:
    """A copy whose token i is the model's token `rows[i]`."""
    config = deepcopy(model.config)
    config.vocab_size = len(rows)
    made = type(model)(config).to(model.dtype).eval()
    sized = {name for name, tensor in model.state_dict().items() if len(tensor) == model.config.vocab_size}
    made.load_state_dict({name: t[rows] if name in sized else t for name, t in model.state_dict().items()})
    return made


def sampled(max_tokens, count=8, temperature=0.9, **fields):
    return [SamplingParams(max_tokens, temperature, seed=seed, ignore_eos=True, **fields) for seed in range(count)]


@pytest.mark.parametrize("first", [None, 111], ids=["as it begins", "with bos"])
@pytest.mark.parametrize("temperatures", [(0.0,) * NUM_SLOTS, MIXED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculation", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_trees_are_those_of_the_models_distribution_over_the_shared_tokens(speculation, temperatures, first):
    """By full contexts in the model's own ids; the other tokens have no probability, before and after acceptance."""
    model = random_model("llama", num_hidden_layers=2, vocab_size=DRAFT_SIZE)
    tables = shared(VOCAB, NUM_SHARED)._replace(first=first)
    drafter = ModelDrafter(prepare_model(model, "draft"), speculation, VOCAB, None, tables)
    spec = channel_spec(speculation, 0)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    judge = random_model("llama", num_hidden_layers=2, vocab_size=DRAFT_SIZE)
    judge.set_attn_implementation("eager")
    world = World(speculation, 0, (1, 9, 17, 40), temperatures)
    assert (world.tokens[world.slots] >= NUM_SHARED).any(), "contexts have other tokens too"
    world.feed(drafter)
    slots = world.slots
    for more in (0, min(3, speculation.max_path)):
        decodes = [(slot, int(world.lens[slot]) - 1, more) for slot in slots] if more else []
        world.lens[slots] += more
        tree = drafter.draft(world.batch(decodes=decodes, proposals=slots))
        for row, slot in enumerate(slots):
            tokens = world.tokens[slot, : world.lens[slot]].tolist()

            def logits_of(path, tokens=tokens):
                draft_ids = tables.draft_ids[torch.tensor([[*tokens, *path]])]
                if first is not None:
                    draft_ids[0, 0] = first
                logits = judge(draft_ids).logits[0, -1]
                return torch.full((VOCAB,), -torch.inf).scatter(0, tables.target_ids, logits[tables.columns])

            temperature, seed = float(world.temperatures[slot]), int(world.seeds[slot])
            assert_tree(tree, row, slow_tree(tokens, logits_of, speculation, temperature, seed))


@pytest.mark.parametrize("params", [greedy_params(48), sampled(48)], ids=["greedy", "sampled"])
def test_the_verifier_under_other_ids_is_always_right(params):
    """Noise is that of the target ids: a sampled draft of a renumbered copy is accepted as a greedy one."""
    ref = reference("llama")
    rows = torch.randperm(ref.loaded.vocab_size, generator=torch.Generator().manual_seed(3))
    tables = SharedTokens(rows.argsort(), rows.argsort(), torch.arange(len(rows)))
    drafter = ModelDrafter(prepare_model(renumbered(ref.loaded.model, rows), "copy"), CHAIN, None, None, tables)
    plain, _ = generate(ref.loaded, engine_config(), None, ref.prompts, params)
    tokens, engine = generate(ref.loaded, engine_config(CHAIN), drafter, ref.prompts, params)
    assert tokens == plain
    assert engine.speculation.num_accepted_tokens == 5 * engine.speculation.num_drafts > 100


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_follow_the_verifiers_distribution(temperature):
    """Chi-square with 9 degrees of freedom, as for heads; six of ten tokens are drafted, by another distribution."""
    model, num_samples = random_model("llama", vocab_size=10, initializer_range=0.15), 2048
    prompt = [3, 1, 4, 1, 5]
    loaded = prepare_model(model, "ten tokens")
    other = random_model("llama", vocab_size=14, num_hidden_layers=1, initializer_range=0.15)
    drafter = ModelDrafter(prepare_model(other, "fourteen tokens"), TREE, 10, None, shared(10, 6))
    config = engine_config(max_num_seqs=512, max_model_len=32, max_num_batched_tokens=4096, num_kv_blocks=2048)
    params = sampled(3, num_samples, temperature)
    tokens, engine = generate(loaded, config, drafter, [prompt] * num_samples, params)
    assert engine.speculation.num_accepted_tokens > num_samples / 8
    expected = exact_marginals(model, prompt, temperature, 3) * num_samples
    counts = torch.stack([torch.bincount(column, minlength=10) for column in torch.tensor(tokens).T])
    assert (((counts - expected) ** 2 / expected).sum(dim=1)).max() < 33.7


def test_a_folder_with_another_vocabulary_is_loaded_with_its_tables(tmp_path):
    """Through the engine, text is that of plain decoding under rules that name tokens of both kinds."""
    kind = foreign_vocabulary(tmp_path)
    drafter = kind.drafter(TREE)
    assert drafter.growth.draft_token_ids.tolist() == list(range(80))
    rules = {"logit_bias": ((3, 2.0), (90, 4.0)), "repetition_penalty": 1.3, "top_k": 40}
    for fields in ({}, rules, {"allowed_token_ids": (5, 6, 7, 85, 86)}):
        plain, _ = generate(kind.ref.loaded, engine_config(), None, kind.ref.prompts, sampled(32, **fields))
        tokens, engine = generate(kind.ref.loaded, engine_config(), drafter, kind.ref.prompts, sampled(32, **fields))
        assert tokens == plain
        assert engine.speculation.num_accepted_tokens > 0


def accepted(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[float]:
    """Tokens a round, greedy and sampled, of text that equals plain decoding's."""
    found = []
    for temperature in (0.0, 1.0):
        plain, drafted = (
            llm.generate(prompts, sampled(max_tokens, len(prompts), temperature, speculation=speculation))
            for speculation in (False, True)
        )
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
        num_drafts = sum(output.metrics.num_drafts for output in drafted)
        found.append(1 + sum(output.metrics.num_accepted_tokens for output in drafted) / num_drafts)
    return found


def opened(verifier: Path, draft: Path) -> LLM:
    config = EngineConfig(max_num_seqs=8, max_model_len=512, num_kv_blocks=400, speculation=SpeculationConfig(4, 1, 5))
    options = {"device": "cpu", "threads": 1, "dtype": "float32", "allow_bad_drafter": True}
    return LLM(str(verifier), str(draft), config, InProcessChannel, **options)


def rewritten(folder: Path, left_out: int) -> Path:
    """The demo's draft model as if its tokenizer were SentencePiece's, without every n-th token of more than a byte."""
    source = DEMO_PAIR / "draft_model"
    ids = Vocabulary.read(source, 4096).ids
    texts = sorted(text for text, token_id in ids.items() if len(text) == 1 or token_id % left_out)
    spelled(folder, reversed(texts))
    found = Vocabulary.read(folder, 10_000)
    size = max(found.texts | dict.fromkeys(found.special.values(), b"")) + 1
    rows = torch.zeros(size, dtype=torch.int64)
    for text, token_id in found.ids.items():
        rows[token_id] = ids[text]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    renumbered(model, rows).save_pretrained(folder)
    return folder


def test_a_real_draft_model_with_another_tokenizer_drafts_nearly_as_well(tmp_path):
    """The demo's draft model by pieces instead of byte-level BPE, with all tokens and without every eighth."""
    verifier = DEMO_PAIR / "verifier"
    prompts = [Tokenizer.load(verifier).encode(text) for text in DEMO_TEXTS]
    own = accepted(opened(verifier, DEMO_PAIR / "draft_model"), prompts, 40)
    whole, part = (accepted(opened(verifier, rewritten(tmp_path / str(n), n)), prompts, 40) for n in (10_000, 8))
    assert whole == pytest.approx(own, abs=0.05)
    assert all(1.3 < few <= all_tokens + 0.1 for few, all_tokens in zip(part, own, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not (SMOLLM2.is_here and GEMMA.is_here), reason="make test-models fetches the models")
@pytest.mark.parametrize(("verifier", "draft"), FIGURES, ids=map("-".join, FIGURES))
def test_published_models_draft_for_one_another(verifier, draft):
    """Figures of docs/drafters.md."""
    folders = {"smol": SMOLLM2.folder, "gemma": GEMMA.folder, "demo": DEMO_PAIR / "verifier"}
    texts = DEMO_TEXTS if "demo" in (verifier, draft) else ENGLISH
    prompts = [Tokenizer.load(folders[verifier]).encode(text) for text in texts]
    found = accepted(opened(folders[verifier], folders[draft]), prompts, 40)
    assert found == pytest.approx(FIGURES[verifier, draft], abs=0.1)
