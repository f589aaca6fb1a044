"""Engines and drafters on a fake GPU, in shapes that the kernels take; every drafter kind by name."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from tests.runtime.fake_gpu import CUDA, FakeGpu, place
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.feature_kinds import of_features
from tests.runtime.text_drafters import text_drafter
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.layers.linears import widen_logits
from wingbeat.runtime.verifier.loading.loader import LoadedModel, prepare_model

VOCAB_SIZE = 256
NUM_LAYERS = 1
CHAIN = SpeculationConfig(draft_steps=3, draft_top_k=1, verify_tree_size=4)
TREE = SpeculationConfig(draft_steps=3, draft_top_k=3, verify_tree_size=8)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
PLAIN = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, speculation=False)
ALTERED = SamplingParams(
    max_tokens=4,
    temperature=0.8,
    seed=2,
    ignore_eos=True,
    repetition_penalty=1.2,
    frequency_penalty=0.5,
    logit_bias=((3, 2.0),),
    bad_words=((5,),),
    min_tokens=2,
    stop_token_ids=(9,),
    logprobs=3,
    prompt_logprobs=1,
)
PROMPT_LENS = (5, 20, 9, 17)

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
IDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


def llama(num_layers: int = NUM_LAYERS) -> LlamaConfig:
    """Configuration of `verifier`."""
    return LlamaConfig(**SHAPE, **IDS, num_hidden_layers=num_layers, tie_word_embeddings=False)


def verifier(num_layers: int = NUM_LAYERS) -> LoadedModel:
    """A Llama in bfloat16 on the fake GPU."""
    return placed_verifier(llama(num_layers))


def new_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model in bfloat16 on the host; its norms have weights as in checkpoints."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.3)
    return model


def placed_verifier(config: PreTrainedConfig) -> LoadedModel:
    """A model in bfloat16 on the fake GPU."""
    model = new_model(config)
    loaded = prepare_model(model, "fake")
    for prepare in of_features("PREPARED_FOR_GPU").values():
        prepare(loaded)
    place(model)
    assert widen_logits(model)
    return loaded


def eagle_head(kind: str) -> DraftHead:
    """An EAGLE-3 or EAGLE-1 head for `verifier` on the fake GPU."""
    fields = dict(SHAPE, target_hidden_size=SHAPE["hidden_size"], draft_vocab_size=VOCAB_SIZE)
    if kind == "eagle-1":
        head = Eagle1Head(Eagle1HeadConfig(**fields, tap_layers=(NUM_LAYERS,)))
    else:
        head = EagleHead(EagleHeadConfig(**fields, tap_layers=(0, 1)))
    place(head)
    head.reset_rope(CUDA)
    return head.eval()


def new_drafter(
    kind: str, speculation: SpeculationConfig, device: FakeGraphDevice | None, num_layers: int = NUM_LAYERS
) -> Drafter:
    """A drafter of the named kind; those that only look tokens up are on the CPU.

    Args:
        num_layers: of a draft model, or of an assistant.
    """
    if kind in ("eagle-3", "eagle-1"):
        return EagleDrafter(eagle_head(kind), speculation, device)
    if kind in TEXT_DRAFTERS:
        return text_drafter(kind, speculation)
    return of_features("ON_FAKE_GPU")[kind](speculation, device, num_layers)


@dataclass
class Served:
    """An engine on the fake GPU and the launches of its rounds."""

    engine: Engine
    device: FakeGraphDevice
    launches: list[Counter] = field(default_factory=list)
    """Launches of each round that holds decodes only."""

    @property
    def num_graphs(self) -> int:
        """Number of graphs of a whole round: two of the verifier, and one of a drafter."""
        return 2 if self.engine.drafter_state == "none" else 3


def engine_config(speculation: SpeculationConfig, num_slots: int, **overrides) -> EngineConfig:
    """Limits under which prompts come in chunks, beside sequences that decode."""
    fields = {"max_num_seqs": num_slots, "max_model_len": 128, "max_num_batched_tokens": 16, "num_kv_blocks": 64}
    return EngineConfig(**(fields | {"speculation": speculation} | overrides))


def serve(
    gpu: FakeGpu,
    config: EngineConfig,
    drafter: Drafter | None,
    params: list[SamplingParams],
    *,
    on_device: bool = True,
    loaded: LoadedModel | None = None,
    build: Callable[..., Engine] = build_engine,
) -> Served:
    """Run more requests than there are slots through an engine, strictly from its first round on.

    Args:
        params: taken in turn by the requests.
        on_device: keep the channel's tensors on the GPU.
        loaded: in the place of `verifier`.
        build: makes the engine.
    """
    device = FakeGraphDevice(gpu)
    channel: Callable = partial(InProcessChannel, device=CUDA) if on_device else InProcessChannel
    engine = build(loaded or verifier(), config, drafter, channel, device)
    served = Served(engine, device)
    for index, length in enumerate(PROMPT_LENS[: config.max_num_seqs + 1]):
        prompt = tuple(range(1, length + 1))
        engine.add_request(Request(str(index), prompt, params[index % len(params)]))
    gpu.strict = True
    while engine.has_unfinished_requests():
        gpu.launches.clear()
        engine.step()
        latest = engine._in_flight[-1] if engine._in_flight else None
        if not engine.scheduler.waiting and (latest is None or not latest.plan.chunks):
            served.launches.append(Counter(gpu.launches))
    return served
