"""Engines and drafters on a fake GPU, in shapes that the kernels take; every drafter kind by name."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, PreTrainedConfig

from tests.runtime.fake_gpu import CUDA, FakeGpu, place
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.text_drafters import text_drafter
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS
from wingbeat.runtime.drafters.draft_model import ModelDrafter
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.mtp import MtpDrafter
from wingbeat.runtime.drafters.one_pass import OnePassDrafter
from wingbeat.runtime.drafters.parallel_eagle import ParallelEagleDrafter
from wingbeat.runtime.drafters.shared_kv import SharedKvDrafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.contract import DraftHead
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.families import OnePassFamily
from wingbeat.runtime.heads.mtp_modules import MtpModules
from wingbeat.runtime.heads.one_pass.config import (
    LatticeConfig,
    LayerMask,
    MarkovConfig,
    MarkovKind,
    OnePassConfig,
    Slots,
)
from wingbeat.runtime.heads.one_pass.head import OnePassHead
from wingbeat.runtime.heads.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.heads.shared_kv_head import SharedKvHead
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.layers.fused import OPS, fuse
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

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_IDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


def verifier(num_layers: int = NUM_LAYERS) -> LoadedModel:
    """A Llama in bfloat16 on the fake GPU."""
    return placed_verifier(LlamaConfig(**_SHAPE, **_IDS, num_hidden_layers=num_layers, tie_word_embeddings=False))


def placed_verifier(config: PreTrainedConfig) -> LoadedModel:
    """A model in bfloat16 on the fake GPU; its norms have weights as checkpoints have them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.3)
    loaded = prepare_model(model, "fake")
    fuse(model, loaded.decoder_layers, loaded.layers, OPS["cuda"])
    place(model)
    assert widen_logits(model)
    return loaded


def eagle_head(kind: str) -> DraftHead:
    """An EAGLE-3 or EAGLE-1 head for `verifier` on the fake GPU."""
    fields = dict(_SHAPE, target_hidden_size=_SHAPE["hidden_size"], draft_vocab_size=VOCAB_SIZE)
    if kind == "eagle-1":
        head = Eagle1Head(Eagle1HeadConfig(**fields, tap_layers=(NUM_LAYERS,)))
    else:
        head = EagleHead(EagleHeadConfig(**fields, tap_layers=(0, 1)))
    place(head)
    head.reset_rope(CUDA)
    return head.eval()


def one_pass_head(kind: str) -> OnePassHead | ParallelEagleHead:
    """A head of two layers in bfloat16 that drafts in one pass, for `verifier` on the fake GPU."""
    shape = dict(_SHAPE, target_hidden_size=_SHAPE["hidden_size"], draft_vocab_size=VOCAB_SIZE)
    if kind == "p-eagle":
        head = ParallelEagleHead(EagleHeadConfig(**shape, tap_layers=(0, 1), num_layers=2), mask_token_id=3)
    else:
        families = {"dflash": OnePassFamily.DFLASH, "dspark": OnePassFamily.DSPARK, "dflash2": OnePassFamily.DFLASH2}
        config = OnePassConfig(
            **shape,
            family=families[kind],
            slots=Slots.SHIFT if kind == "dspark" else Slots.FILL_IN,
            block_size=8,
            masks=(LayerMask(True, 8), LayerMask()),
            tap_layers=(0, 1),
            mask_token_id=3,
            markov=MarkovConfig(8, MarkovKind.RNN, True) if kind == "dspark" else None,
            lattice=LatticeConfig(2, 16, 8, 6) if kind == "dflash2" else None,
        )
        head = OnePassHead(config)
    place(head.to(torch.bfloat16))
    head.reset_rope(CUDA)
    return head.eval()


def mtp_modules(count: int = 2) -> MtpModules:
    """Modules of the verifier's own layers on the fake GPU."""
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**_SHAPE, **_IDS, num_hidden_layers=NUM_LAYERS), dtype=torch.bfloat16
        )
        modules = MtpModules(model, count).to(torch.bfloat16)
    for module in modules.items:
        module.embedding, module.head = model.get_input_embeddings().weight.data, model.lm_head.weight.data
    modules.prepare()
    return place(modules)


def assistant(num_layers: int, speculation: SpeculationConfig, device: FakeGraphDevice | None) -> SharedKvDrafter:
    """A head over the keys and values of the verifier's last layer, all of whose layers attend to everything."""
    fields = dict(_SHAPE, global_head_dim=_SHAPE["head_dim"], num_hidden_layers=num_layers)
    fields |= {"layer_types": ["full_attention"] * num_layers, "num_kv_shared_layers": num_layers}
    config = Gemma4TextConfig(
        **fields, **_IDS, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, enable_moe_block=False
    )
    head = place(SharedKvHead(config, _SHAPE["hidden_size"]).to(torch.bfloat16))
    head.lend(torch.empty(VOCAB_SIZE, _SHAPE["hidden_size"], dtype=torch.bfloat16, device=CUDA), 8.0)
    layer = LayerAttention(_SHAPE["num_attention_heads"], _SHAPE["num_key_value_heads"], 16, 16, None)
    kv_layers = {"full_attention": NUM_LAYERS - 1}
    return SharedKvDrafter(head.eval(), kv_layers, [layer], speculation, NUM_LAYERS, device)


def new_drafter(
    kind: str, speculation: SpeculationConfig, device: FakeGraphDevice | None, num_layers: int = NUM_LAYERS
) -> Drafter:
    """A drafter of the named kind; those that only look tokens up are on the CPU.

    Args:
        num_layers: of a draft model, or of an assistant.
    """
    match kind:
        case "eagle-3" | "eagle-1":
            return EagleDrafter(eagle_head(kind), speculation, device)
        case "dflash" | "dspark" | "dflash2":
            return OnePassDrafter(one_pass_head(kind), speculation, device)
        case "p-eagle":
            return ParallelEagleDrafter(one_pass_head(kind), speculation, device)
        case "draft-model":
            return ModelDrafter(verifier(num_layers), speculation, graph_device=device)
        case "mtp":
            return MtpDrafter(mtp_modules(), speculation, NUM_LAYERS, device)
        case "assistant":
            return assistant(num_layers, speculation, device)
    if kind in TEXT_DRAFTERS:
        return text_drafter(kind, speculation)
    raise ValueError(kind)


@dataclass
class Served:
    """What rounds of an engine on the fake GPU launched."""

    engine: Engine
    device: FakeGraphDevice
    launches: list[Counter] = field(default_factory=list)
    """Of each round with nothing but decodes."""

    @property
    def num_graphs(self) -> int:
        """Of a whole round: the verifier's two, and the drafter's where there is one."""
        return 2 if self.engine.drafter_state == "none" else 3


def engine_config(speculation: SpeculationConfig, num_slots: int, **overrides) -> EngineConfig:
    """Prompts come in chunks, beside running sequences."""
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
) -> Served:
    """Run more requests than there are slots through an engine, strictly from its first round on.

    Args:
        params: taken in turn by the requests.
        on_device: keep the channel's tensors on the GPU.
        loaded: in the place of `verifier`.
    """
    device = FakeGraphDevice(gpu)
    channel: Callable = partial(InProcessChannel, device=CUDA) if on_device else InProcessChannel
    engine = build_engine(loaded or verifier(), config, drafter, channel, device)
    served = Served(engine, device)
    for index, length in enumerate(PROMPT_LENS[: config.max_num_seqs + 1]):
        prompt = tuple(range(1, length + 1))
        engine.add_request(Request(str(index), prompt, params[index % len(params)]))
    gpu.strict = True
    while engine.has_unfinished_requests():
        gpu.launches.clear()
        engine.step()
        if not engine.scheduler.waiting:
            served.launches.append(Counter(gpu.launches))
    return served
