"""Every kind of drafter, loaded as a user would name it: speed may change, no token does."""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.runtime.drafters.test_shared_kv import saved
from tests.runtime.models import (
    CHAIN,
    HIDDEN_SIZE,
    TREE,
    VOCAB_SIZE,
    Reference,
    Run,
    engine_config,
    generate,
    greedy,
    greedy_params,
    new_engine,
    random_head,
    random_model,
    random_prompts,
    reference,
)
from tests.runtime.mtp_world import Modules
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import connect
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loader import load_model

SHORT = 32
PROMPT_LENS = (5, 17, 40, 3, 64, 9, 33, 21)
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "user_drafter")
SHAPES = {"chain": CHAIN, "tree": TREE}


@dataclass
class Kind:
    """A verifier, what it writes plainly, and how its drafter is called."""

    ref: Reference
    target: TargetDescription
    source: str
    sampled: list[list[int]] = field(default_factory=list)
    """What `sampled_params` write without a drafter."""

    @property
    def greedy(self) -> list[list[int]]:
        return [tokens[:SHORT] for tokens in self.ref.continuations]

    def drafter(self, shape):
        return load_drafter(self.source, self.target, shape)

    def generate(self, shape, prompts, params, **limits):
        return generate(self.ref.loaded, engine_config(shape, **limits), self.drafter(shape), prompts, params)


def llama(folder: Path) -> tuple[Reference, TargetDescription]:
    """The verifier that most kinds draft for, saved where a drafter may look for its tensors."""
    ref = reference("llama")
    ref.loaded.model.save_pretrained(folder)
    return ref, TargetDescription.from_checkpoint(folder)


def by_name(name: str, folder: Path) -> Kind:
    return Kind(*llama(folder / "verifier"), name)


def eagle3(folder: Path) -> Kind:
    ref, target = llama(folder / "verifier")
    save_eagle_head(random_head(ref.loaded), folder / "head")
    return Kind(ref, target, str(folder / "head"))


def eagle1(folder: Path) -> Kind:
    ref, target = llama(folder / "verifier")
    torch.manual_seed(7)
    config = Eagle1HeadConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        target_hidden_size=HIDDEN_SIZE,
        tap_layers=(target.num_layers,),
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
    )
    save_eagle_head(Eagle1Head(config), folder / "head")
    return Kind(ref, target, str(folder / "head"))


def draft_model(folder: Path) -> Kind:
    ref, target = llama(folder / "verifier")
    random_model("llama", num_hidden_layers=2).save_pretrained(folder / "small")
    return Kind(ref, target, str(folder / "small"))


def of_folder(verifier: Path, source: str) -> Kind:
    """A kind that drafts for a verifier of its own."""
    loaded = load_model(verifier, torch.float32, torch.device("cpu"))
    ref = Reference(verifier.name, loaded, random_prompts(PROMPT_LENS))
    for prompt in ref.prompts:
        tokens, gap = greedy(ref.loaded.model, prompt, SHORT)
        ref.continuations.append(tokens)
        ref.smallest_gap = min(ref.smallest_gap, gap)
    return Kind(ref, TargetDescription.from_checkpoint(verifier), source)


def mtp(folder: Path) -> Kind:
    Modules.random("glm4_moe", 2).save(folder)
    return of_folder(folder, "mtp")


def shared_keys(folder: Path) -> Kind:
    verifier, head = saved(folder)
    return of_folder(verifier, str(head))


KINDS = {
    "eagle1": eagle1,
    "eagle3": eagle3,
    "draft_model": draft_model,
    "mtp": mtp,
    "shared_keys": shared_keys,
    "ngram": partial(by_name, "ngram"),
    "suffix": partial(by_name, "suffix"),
    "user": partial(by_name, "bigram_drafter.BigramDrafter"),
}
PROPOSING = {"eagle1", "eagle3", "draft_model", "mtp", "shared_keys", "user"}
"""Kinds that have a tree for every context; the others need one that occurred before."""


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request, tmp_path_factory):
    sys.path.insert(0, EXAMPLE)
    made = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    made.sampled, _ = generate(made.ref.loaded, engine_config(), None, made.ref.prompts, sampled_params())
    # The references are decisive: rounding moves these logits by some 1e-5.
    assert made.ref.smallest_gap > 1e-4
    yield made
    sys.path.remove(EXAMPLE)


def sampled_params(**fields) -> list[SamplingParams]:
    """Eight seeds at three temperatures."""
    return [
        SamplingParams(max_tokens=SHORT, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=True, **fields)
        for seed, (temperature, top_p) in enumerate([(0.7, 1.0), (1.0, 0.9), (1.2, 1.0), (0.7, 0.8)] * 2)
    ]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_text_is_that_of_transformers(kind, shape, batch):
    count = 8 if batch == 8 else 2
    prompts = kind.ref.prompts[:count]
    tokens, engine = kind.generate(shape, prompts, greedy_params(SHORT), max_num_seqs=batch)
    assert tokens == kind.greedy[:count]
    assert engine.drafter_state == "attached"
    assert engine.speculation.num_drafts > 0


@pytest.mark.parametrize(("shape", "overlap"), [(CHAIN, True), (TREE, False)], ids=["chain-overlapped", "tree"])
def test_sampled_text_is_that_of_plain_decoding(kind, shape, overlap):
    tokens, engine = kind.generate(shape, kind.ref.prompts, sampled_params(), overlap=overlap)
    assert tokens == kind.sampled
    assert engine.drafter_state == "attached"


def test_preempted_requests_go_on_as_they_were(kind):
    tokens, engine = kind.generate(
        TREE, kind.ref.prompts, greedy_params(SHORT), max_model_len=128, num_kv_blocks=18, max_num_batched_tokens=24
    )
    assert tokens == kind.greedy
    assert engine.stats().num_preemptions > 0
    assert engine.drafter_state == "attached"


def test_cached_prefixes_are_cached_for_the_drafter_too(kind):
    """The same prompts again, and prompts that part from them in the middle of a block."""
    engine = new_engine(kind.ref.loaded, engine_config(block_size=4, num_kv_blocks=600), kind.drafter(TREE))
    first, texts = kind.ref.prompts[:5], kind.greedy[:5]
    assert Run(engine, first, greedy_params(SHORT)).finish() == texts
    before = engine.speculation.num_drafts
    forks = [[*prompt, *tokens[:10]] for prompt, tokens in zip(first, texts, strict=True)]
    for prompts, skipped in ((first, 0), (forks, 10)):
        run = Run(engine, prompts, greedy_params(SHORT - skipped))
        assert run.finish() == [tokens[skipped:] for tokens in texts]
        assert sum(output.num_cached_tokens for output in run.last.values()) > 100
    assert engine.speculation.num_drafts > before
    engine.model.remove_taps()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_another_drafter_may_take_over_in_the_middle(kind, shape):
    engine = new_engine(kind.ref.loaded, engine_config(shape), kind.drafter(shape))
    run = Run(engine, kind.ref.prompts, greedy_params(SHORT))
    for _ in range(6):
        run.step()
    engine.detach_drafter()
    for _ in range(3):
        run.step()
    assert engine.drafter_state == "none"
    before = engine.speculation.num_drafts
    connect(engine, kind.drafter(shape), InProcessChannel)
    assert run.finish() == kind.greedy
    assert engine.stats().num_drafters_attached == 2
    assert engine.speculation.num_drafts > before
    engine.model.remove_taps()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_requests_that_switch_speculation_off_get_their_plain_text(kind, shape, request):
    """Greedy and sampled requests in one batch, every other one without speculation."""
    params = [
        greedy_params(SHORT, speculation=index % 2 == 0) if index < 4 else sampled
        for index, sampled in enumerate(sampled_params())
    ]
    params[5], params[7] = (sampled_params(speculation=False)[index] for index in (5, 7))
    engine = new_engine(kind.ref.loaded, engine_config(shape), kind.drafter(shape))
    run = Run(engine, kind.ref.prompts, params)
    assert run.finish() == kind.greedy[:4] + kind.sampled[4:]
    drafts = [run.last[index].metrics.num_drafts for index in range(8)]
    assert not any(drafts[1::2])
    always = request.node.callspec.params["kind"] in PROPOSING
    assert all(drafts[0::2]) if always else any(drafts[0::2])
    engine.model.remove_taps()
