"""Every kind of drafter, loaded as a user would name it, with a verifier that it drafts for."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tests.runtime.drafters.test_shared_kv import saved
from tests.runtime.eagle_formula import random_weights
from tests.runtime.head_formats import FORMATS
from tests.runtime.models import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    Reference,
    greedy,
    random_head,
    random_model,
    random_prompts,
    reference,
)
from tests.runtime.mtp_world import Modules
from tests.runtime.one_pass_world import random_tensors, raw_config, save_head
from tests.runtime.parallel_eagle_world import parallel_config, parallel_tensors
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.verifier.loading.loader import load_model

NUM_TOKENS = 48
"""That a reference of a kind's own verifier holds."""
PROMPT_LENS = (5, 17, 40, 3, 64, 9, 33, 21)
USER_DRAFTER = str(Path(__file__).parents[2] / "examples" / "user_drafter")


@dataclass
class Kind:
    """A verifier, what it writes plainly, and how its drafter is called."""

    ref: Reference
    target: TargetDescription
    source: str

    def drafter(self, speculation: SpeculationConfig) -> Drafter:
        """A new one."""
        return load_drafter(self.source, self.target, speculation)


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


def other_body(name: str, folder: Path) -> Kind:
    """An EAGLE-3 head whose layers are not one layer of Llama's."""
    ref, target = llama(folder / "verifier")
    written = FORMATS[name]
    recipe = replace(written.recipe, hidden=HIDDEN_SIZE, target_hidden=HIDDEN_SIZE)
    config = written.config | {"hidden_size": HIDDEN_SIZE, "draft_vocab_size": VOCAB_SIZE}
    taps = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    weights = random_weights(recipe, VOCAB_SIZE, VOCAB_SIZE)
    replace(written, recipe=recipe, config=config | taps, leaves_out=()).write(folder / "head", weights)
    return Kind(ref, target, str(folder / "head"))


def draft_model(folder: Path) -> Kind:
    ref, target = llama(folder / "verifier")
    random_model("llama", num_hidden_layers=2).save_pretrained(folder / "small")
    return Kind(ref, target, str(folder / "small"))


def of_folder(verifier: Path, source: str) -> Kind:
    """A kind that drafts for a verifier of its own."""
    loaded = load_model(verifier, torch.float32, torch.device("cpu"))
    prompts = random_prompts(PROMPT_LENS)
    ref = Reference(verifier.name, loaded, prompts, *greedy(loaded.model, prompts, NUM_TOKENS))
    return Kind(ref, TargetDescription.from_checkpoint(verifier), source)


def mtp(folder: Path) -> Kind:
    Modules.random("glm4_moe", 2).save(folder)
    return of_folder(folder, "mtp")


def shared_keys(folder: Path) -> Kind:
    verifier, head = saved(folder)
    return of_folder(verifier, str(head))


def one_pass(family: str, folder: Path) -> Kind:
    """A head of DFlash's body, of two layers, with a block of more slots than are drafted."""
    ref, target = llama(folder / "verifier")
    raw = raw_config(family, (0, 1, 2), num_layers=2, block_size=10)
    return Kind(ref, target, str(save_head(folder / "head", raw, random_tensors(raw))))


def parallel_eagle(folder: Path) -> Kind:
    ref, target = llama(folder / "verifier")
    raw = parallel_config((1, 2, 3), num_layers=2)
    return Kind(ref, target, str(save_head(folder / "head", raw, parallel_tensors(raw))))


KINDS = {
    "eagle1": eagle1,
    "eagle3": eagle3,
    "eagle3_latent": partial(other_body, "latent"),
    "eagle3_layers": partial(other_body, "several-layers"),
    "draft_model": draft_model,
    "mtp": mtp,
    "shared_keys": shared_keys,
    "dflash": partial(one_pass, "dflash"),
    "jetspec": partial(one_pass, "jetspec"),
    "dspark": partial(one_pass, "dspark-rnn"),
    "dflash2": partial(one_pass, "dflash2"),
    "peagle": parallel_eagle,
    **{name: partial(by_name, name) for name in TEXT_DRAFTERS},
    "user": partial(by_name, "bigram_drafter.BigramDrafter"),
}
