"""The demo pair on the GPU of numbers from its load to its tokens; in a process of `test_gpu_of_numbers`.

A start there has everything that a GPU's has: the trial against transformers, fused layers, memory measured and fitted,
captures on both sides, the drafter's self-test. Whatever is drafted, the tokens are those of the CPU in float32.
"""

import os
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gpu_of_numbers.device import CUDA
from tests.near_ties import GAP, Written, check_same_texts
from tests.runtime.written_texts import scores_of
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import LLM, connect
from wingbeat.runtime.scheduling.request import GrammarSpec, Request, SamplingParams

PAIR = demo_pair()
SHAPES = {
    "chain": SpeculationConfig(draft_steps=3, draft_top_k=1, verify_tree_size=4),
    "tree": SpeculationConfig(draft_steps=3, draft_top_k=3, verify_tree_size=8),
    "adaptive": SpeculationConfig(draft_steps=3, draft_top_k=3, verify_tree_size=8, adaptive=True),
}
TEXTS = ("import os\nimport", "class Queue:\n    def __init__(self, maxsize=0):\n        self.", "for name, value in")
WAYS = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "altered": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": ((70, 2.0),),
        "bad_words": ((65,),),
        "min_tokens": 4,
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
    "grammar": {"temperature": 0.0, "grammar": GrammarSpec("regex", r"[a-z]{3,9}\([a-z]{1,6}(, [a-z]{1,6}){2,4}\)")},
}
NUM_TOKENS = 10
GAPS = {"float32": GAP, "bfloat16": 0.5}
"""By how much logits of the pair differ at most between two implementations."""
FACTORY = partial(InProcessChannel, device=CUDA)


def config(shape: SpeculationConfig, **fields) -> EngineConfig:
    """Two places for three requests, whose prompts come in chunks."""
    limits = {"max_num_seqs": 2, "max_model_len": 160, "max_num_batched_tokens": 24, "speculation": shape}
    return EngineConfig(**(limits | fields))


def params(way: str, **fields) -> SamplingParams:
    """As `WAYS` has them."""
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": "grammar" not in WAYS[way]} | WAYS[way] | fields))


@pytest.fixture(scope="session")
def dtype() -> str:
    """The dtype of weights and caches."""
    return os.environ.get("PAIR_DTYPE", "float32")


@pytest.fixture(scope="module", params=SHAPES)
def llm(request, gpu, dtype) -> LLM:
    return LLM(PAIR.verifier, PAIR.drafter, config(SHAPES[request.param]), FACTORY, device="cuda", dtype=dtype)


@pytest.fixture(scope="module")
def on_cpu() -> LLM:
    """The verifier on the CPU, where none of the GPU's code is run."""
    return LLM(PAIR.verifier, "none", config(SHAPES["chain"]), InProcessChannel, device="cpu", dtype="float32")


def prompts(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.encode(text) for text in TEXTS]


def tokens(llm: LLM, wanted: SamplingParams) -> list[list[int]]:
    """Tokens that follow each prompt."""
    return [result.token_ids for result in llm.generate(prompts(llm), [wanted] * len(TEXTS))]


def check_same(llm: LLM, found: list[list[int]], expected: list[list[int]], way: str, dtype: str) -> None:
    """Texts of `TEXTS` are the same; up to near-ties where nothing but temperature and noise alters the logits."""
    if not WAYS[way].keys() <= {"temperature", "top_p", "seed"}:
        assert found == expected
        return

    def scores_at(index: int, place: int) -> dict[int, float]:
        model = AutoModelForCausalLM.from_pretrained(PAIR.verifier, dtype=torch.float32)
        token_ids = prompts(llm)[index] + expected[index][:place]
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids])).logits[0, -1]
        return scores_of(dict(enumerate(logits.tolist())), params(way), len(token_ids))

    texts = [Written(text, partial(scores_at, index)) for index, text in enumerate(expected)]
    check_same_texts(found, texts, GAPS[dtype])


def test_a_start_tries_everything_and_every_stage_is_captured(gpu, llm):
    assert llm.engine.loaded.device.type == "cuda"
    assert llm.self_test.passed
    stats = llm.engine.runner.graphs.stats
    assert stats.failed == []
    assert {stage for stage, _ in stats.captured} >= {stage for stage in Stage if stage.startswith("base")}
    assert torch.cuda.memory_allocated() > llm.engine.cache.num_blocks * llm.engine.cache.block_bytes


@pytest.mark.parametrize("way", WAYS)
def test_drafted_tokens_are_those_of_plain_decoding_and_of_the_cpu(gpu, llm, on_cpu, way, dtype):
    accepted = llm.engine.speculation.num_accepted_tokens
    replays, before = gpu.num_replays, dict(llm.engine.runner.graphs.stats.eager_runs)
    drafted = tokens(llm, params(way, force_drafts=True))
    check_same(llm, drafted, tokens(llm, params(way, speculation=False)), way, dtype)
    if dtype == "float32":
        check_same(llm, drafted, tokens(on_cpu, params(way, speculation=False)), way, dtype)
    assert all(drafted)
    assert llm.engine.speculation.num_accepted_tokens > accepted
    assert gpu.num_replays > replays
    eager = {s for s, n in llm.engine.runner.graphs.stats.eager_runs.items() if n > before.get(s, 0)}
    # By what was accepted, a prompt may be alone in its round.
    prompts = {Stage.BASE_MIXED, Stage.BASE_PROMPTS}
    assert eager <= (prompts if way == "altered" else set()), "whose prompts are reported"
    assert llm.engine.drafter_state == "attached"
    llm.engine.check_integrity()


def test_log_probabilities_are_those_of_the_cpu(llm, on_cpu, dtype):
    if dtype != "float32":
        return

    def reported(one: LLM, speculation: bool) -> list[float]:
        wanted = params("altered", speculation=speculation, force_drafts=speculation)
        outputs = one.stream(prompts(one), [wanted] * len(TEXTS))
        found = {index: [] for index in range(len(TEXTS))}
        for index, output in outputs:
            found[index] += [part.logprob for part in (*output.prompt_logprobs, *output.logprobs)]
        return [number for numbers in found.values() for number in numbers]

    expected = reported(on_cpu, False)
    assert len(expected) > len(TEXTS) * NUM_TOKENS
    assert reported(llm, True) == pytest.approx(expected, abs=1e-3)


def test_a_drafter_that_is_lost_in_the_middle_and_replaced_changes_no_token(llm, monkeypatch, dtype):
    wanted = params("top-p", force_drafts=True)
    expected = tokens(llm, params("top-p", speculation=False))
    outputs = llm.stream(prompts(llm), [wanted] * len(TEXTS))
    found: list[list[int]] = [[] for _ in TEXTS]
    states, draft = [], EagleDrafter.draft

    def fail(*args):
        raise RuntimeError("the drafter's device is gone")

    for number, (index, output) in enumerate(outputs):
        found[index] += output.token_ids
        states.append(str(llm.engine.drafter_state))
        if number == 1:
            monkeypatch.setattr(EagleDrafter, "draft", fail)
        elif states[-1] == "lost" and EagleDrafter.draft is fail:
            monkeypatch.setattr(EagleDrafter, "draft", draft)
            connect(llm.engine, new_drafter(llm), FACTORY)
    check_same(llm, found, expected, "top-p", dtype)
    assert states[0] == states[-1] == "attached"
    assert "lost" in states


def new_drafter(llm: LLM) -> EagleDrafter:
    options = DrafterOptions(llm.engine.loaded.dtype, "cuda", True, False)
    target = TargetDescription.from_checkpoint(PAIR.verifier)
    return load_drafter(PAIR.drafter, target, llm.engine.config.speculation, options)


def test_an_aborted_request_leaves_the_others_their_tokens(llm):
    wanted = params("greedy", force_drafts=True)
    expected = tokens(llm, wanted)
    for index, prompt in enumerate(prompts(llm)):
        llm.engine.add_request(Request(str(index), tuple(prompt), wanted))
    found: list[list[int]] = [[] for _ in TEXTS]
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            found[int(output.request_id)] += output.token_ids
            if found[0]:
                llm.engine.abort_request("0")
    assert 0 < len(found[0]) < NUM_TOKENS
    assert found[1:] == expected[1:]
    llm.engine.check_integrity()
