"""Gemma 4 heads that read the verifier's KV draft what transformers' code drafts from dense keys and values."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from tests.runtime.draft_world import MIXED, NUM_SLOTS, SHAPES, World, channel_spec, watch_proposals
from tests.runtime.heads.test_refused_early import start
from tests.runtime.models import (
    CHAIN,
    HIDDEN_SIZE,
    TREE,
    VOCAB_SIZE,
    Run,
    engine_config,
    generate,
    greedy,
    greedy_params,
    random_prompts,
)
from tests.runtime.slow_growth import assert_tree, slow_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.assistants.shared_kv_drafter import build_shared_kv
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.load import CheckpointError
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.vocabulary import VocabularyError
from wingbeat.runtime.llm import connect
from wingbeat.runtime.verifier.loading.loader import load_model

pytestmark = pytest.mark.few(1)

TYPES = ["sliding_attention", "full_attention"]
WINDOW = 12
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "enable_moe_block": False,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def verifier_config(shared_layers, **overrides):
    # transformers supports layers that share keys only together with per-layer inputs.
    per_layer = 8 if shared_layers else 0
    fields = {
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 6,
        "layer_types": TYPES * 3,
        "num_kv_shared_layers": shared_layers,
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }
    return Gemma4TextConfig(**(_SHAPE | fields | overrides))


def head_config(clusters=False, backbone_hidden_size=HIDDEN_SIZE, **overrides):
    fields = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    size = overrides.get("vocab_size", VOCAB_SIZE)
    text = Gemma4TextConfig(**(_SHAPE | fields | overrides))
    extra = {"num_centroids": size // 8, "centroid_intermediate_top_k": 3} if clusters else {}
    return Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=backbone_hidden_size, use_ordered_embeddings=clusters, **extra
    )


@contextmanager
def heads_can_be_built():
    """Patch transformers 5.23, which refuses models all of whose layers share keys, such as its own Gemma 4 heads."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(Gemma4TextConfig, "kv_sharing_modes"):
            modes = Gemma4TextConfig.kv_sharing_modes.fget

            def mended(config):
                count = config.num_hidden_layers
                return ["reuse"] * count if config.num_kv_shared_layers == count else modes(config)

            patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(mended))
        yield


def random_head(config):
    torch.manual_seed(5)
    with heads_can_be_built():
        head = Gemma4AssistantForCausalLM(config).eval()
    for name, parameter in head.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.2)
    if head.masked_embedding is not None:
        head.masked_embedding.token_ordering.copy_(torch.randperm(config.text_config.vocab_size))
    return head


@cache
def saved(root, shared_layers=2, clusters=False):
    """Folders of a verifier and of its head."""
    size = {"vocab_size": 96} if clusters else {}
    torch.manual_seed(0)
    verifier = AutoModelForCausalLM.from_config(verifier_config(shared_layers, **size), dtype=torch.float32)
    folders = [root / f"{part}-{shared_layers}-{clusters}" for part in ("verifier", "head")]
    verifier.save_pretrained(folders[0])
    random_head(head_config(clusters, **size)).save_pretrained(folders[1])
    return folders


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("gemma4")


def build(folders, speculation):
    target = TargetDescription.from_checkpoint(folders[0])
    return load_drafter(folders[1], target, speculation)


class Slow:
    """transformers' head over dense keys and values."""

    def __init__(self, folders):
        with heads_can_be_built():
            self.head = AutoModelForCausalLM.from_pretrained(
                folders[1], dtype=torch.float32, attn_implementation="eager"
            )
        self.embed = load_model(folders[0], torch.float32, torch.device("cpu")).model.get_input_embeddings()

    def logits_of(self, tokens, hidden, shared):
        """Return a function from a drafted path to logits; `hidden` is the state of the last settled position."""

        def step(token, state):
            inputs = torch.cat([self.embed(torch.tensor([[token]])), state[None, None]], dim=-1)
            positions = torch.tensor([[len(tokens) - 1]])
            out = self.head(inputs_embeds=inputs, position_ids=positions, shared_kv_states=shared, use_cache=False)
            return out.logits[0, 0], out.last_hidden_state[0, 0]

        def logits_of(path):
            logits, state = step(tokens[-1], hidden)
            for token in path:
                logits, state = step(token, state)
            return logits

        return logits_of


def split(taps):
    """Taps [num_positions, taps_size] -> hidden states, and keys and values by type of layer."""
    shapes = ((2, 16), (2, 24))
    parts = taps.split([HIDDEN_SIZE, *(heads * dim for heads, dim in shapes for _ in range(2))], dim=1)
    pairs = zip(parts[1::2], parts[2::2], shapes, TYPES, strict=True)
    shared = {kind: tuple(x.unflatten(1, shape).transpose(0, 1)[None] for x in (k, v)) for k, v, shape, kind in pairs}
    return parts[0], shared


def check(tree, world, slots, slow, speculation):
    for row, slot in enumerate(slots):
        length = int(world.lens[slot])
        tokens = world.tokens[slot, :length].tolist()
        hidden, shared = split(world.taps[slot, : length - 1])
        temperature, seed = float(world.temperatures[slot]), int(world.seeds[slot])
        logits_of = slow.logits_of(tokens, hidden[-1], shared)
        assert_tree(tree, row, slow_tree(tokens, logits_of, speculation, temperature, seed))


@pytest.mark.parametrize("temperatures", [(0.0,) * NUM_SLOTS, MIXED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculation", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_trees_equal_those_of_dense_keys(root, speculation, temperatures):
    """Cases: unequal lengths within the window and beyond it; five drafted levels, three tokens accepted, five more."""
    folders = saved(root)
    drafter, slow = build(folders, speculation), Slow(folders)
    spec = channel_spec(speculation, drafter.taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    world = World(speculation, drafter.taps_size, (2, 9, WINDOW + 2, 40), temperatures)
    world.feed(drafter)
    for slots, tree in world.drafted_twice(drafter):
        check(tree, world, slots, slow, speculation)


@pytest.mark.slow
@torch.inference_mode()
def test_output_by_clusters_of_tokens(root):
    folders = saved(root, clusters=True)
    drafter, slow = build(folders, TREE), Slow(folders)
    spec = channel_spec(TREE, drafter.taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    world = World(TREE, drafter.taps_size, (9, 17))
    world.tokens.clamp_(max=95)
    world.feed(drafter)
    check(drafter.propose(world.batch(proposals=world.slots)), world, world.slots, slow, TREE)


@pytest.mark.slow
@torch.inference_mode()
def test_a_shared_prefix_is_not_sent_again(root):
    folders = saved(root)
    drafter, slow = build(folders, TREE), Slow(folders)
    spec = channel_spec(TREE, drafter.taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    world = World(TREE, drafter.taps_size, (13, 14))
    first, second = world.slots
    world.taps[second, :8] = world.taps[first, :8]
    world.tables[second, :2] = world.tables[first, :2]
    drafter.commit(world.batch(chunks=[(first, 0, 12)]))
    drafter.commit(world.batch(chunks=[(second, 8, 5)]))
    check(drafter.propose(world.batch(proposals=world.slots)), world, world.slots, slow, TREE)


@torch.inference_mode()
def dense_state(loaded, tokens):
    """The verifier's last hidden state and shared keys behind all but the last of the tokens, from its own code."""
    model, seen = loaded.model, {}
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, out: seen.update(kwargs["shared_kv_states"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    hidden = model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0, -1]
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(before)
    return hidden, seen


@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_engine_sends_the_keys_that_its_layers_share(root, speculation, late):
    """Every tree of a run equals transformers' one, replayed contexts or not; the text is generate()'s."""
    folders = saved(root)
    loaded = load_model(folders[0], torch.float32, torch.device("cpu"))
    drafter, slow = build(folders, speculation), Slow(folders)
    seen = watch_proposals(drafter)
    prompts = random_prompts((5, 17, 40))
    engine = Engine(loaded, engine_config(speculation, max_num_batched_tokens=16), drafter.needs)
    run = Run(engine, prompts, greedy_params(24))
    while late and min(len(tokens) for tokens in run.tokens) < 5:
        run.step()
    connect(engine, drafter, InProcessChannel)
    tokens = run.finish()
    engine.model.remove_taps()
    assert tokens == greedy(loaded.model, prompts, 24)[0]
    assert engine.speculation.num_drafts == len(seen) > 20
    with torch.inference_mode():
        for history, tree in seen[::5]:
            logits_of = slow.logits_of(history, *dense_state(loaded, history))
            assert_tree(tree, 0, slow_tree(history, logits_of, speculation))


@pytest.mark.slow
def test_a_verifier_without_shared_layers_lends_its_last_ones(root):
    folders = saved(root, shared_layers=0)
    drafter = build(folders, CHAIN)
    assert drafter.needs.kv_layers == (4, 5)
    assert build(saved(root), CHAIN).needs.kv_layers == (2, 3)
    loaded = load_model(folders[0], torch.float32, torch.device("cpu"))
    prompts = random_prompts((5, 17))
    tokens, engine = generate(loaded, engine_config(CHAIN), drafter, prompts, greedy_params(24))
    assert tokens == greedy(loaded.model, prompts, 24)[0]
    assert engine.drafter_state == "attached"


def test_heads_of_other_verifiers_are_refused(root, tmp_path):
    folders = saved(root)
    target = TargetDescription.from_checkpoint(folders[0])

    def refused(name, config):
        random_head(config).save_pretrained(tmp_path / name)
        return build_shared_kv(str(tmp_path / name), target, CHAIN, DrafterOptions())

    with pytest.raises(CheckpointError, match="backbone_hidden_size=48 differs from the target's 64"):
        refused("width", head_config(backbone_hidden_size=48))
    with pytest.raises(CheckpointError, match="full_attention has 4 heads of 16: the verifier's layer 3 has 2 of 24"):
        refused("heads", head_config(global_head_dim=16))
    with pytest.raises(VocabularyError, match="96 and 97 tokens"):
        refused("vocabulary", head_config(vocab_size=96))
    tensors = load_file(folders[1] / "model.safetensors")
    tensors["model.extra.weight"] = tensors.pop("pre_projection.weight")
    random_head(head_config()).save_pretrained(tmp_path / "tensors")
    save_file(tensors, tmp_path / "tensors" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the head lacks tensors: pre_projection\.weight \(1 in all\)"):
        build_shared_kv(str(tmp_path / "tensors"), target, CHAIN, DrafterOptions())
    target.config.model_type = "llama"
    with pytest.raises(CheckpointError, match="an assistant of Gemma 4: the verifier is of type llama"):
        refused("family", head_config())
    drafter = build(folders, CHAIN)
    with pytest.raises(ValueError, match="taps of size 64: 224 needed"):
        drafter.resize(channel_spec(CHAIN, 64), 1, 1)


def test_an_assistant_of_another_verifier_is_refused_before_weights_are_read(root, tmp_path, monkeypatch):
    random_head(head_config(backbone_hidden_size=48)).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"^drafter narrow: backbone_hidden_size=48 differs from the target's 64"):
        start(saved(root)[0], tmp_path / "narrow", monkeypatch)
