"""Every kind of drafter, loaded as a user would name it, with a verifier that it drafts for."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tests.runtime.eagle_formula import random_weights
from tests.runtime.feature_kinds import of_features
from tests.runtime.head_formats import FORMATS
from tests.runtime.loaded_kind import Kind, by_name, llama
from tests.runtime.models import HIDDEN_SIZE, VOCAB_SIZE, random_head
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.save import save_eagle_head

USER_DRAFTER = str(Path(__file__).parents[2] / "examples" / "user_drafter")


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
    """Build a kind whose EAGLE-3 head has more than a single Llama layer."""
    ref, target = llama(folder / "verifier")
    written = FORMATS[name]
    recipe = replace(written.recipe, hidden=HIDDEN_SIZE, target_hidden=HIDDEN_SIZE)
    config = written.config | {"hidden_size": HIDDEN_SIZE, "draft_vocab_size": VOCAB_SIZE}
    taps = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    weights = random_weights(recipe, VOCAB_SIZE, VOCAB_SIZE)
    replace(written, recipe=recipe, config=config | taps, leaves_out=()).write(folder / "head", weights)
    return Kind(ref, target, str(folder / "head"))


KINDS = {
    "eagle1": eagle1,
    "eagle3": eagle3,
    "eagle3_latent": partial(other_body, "latent"),
    "eagle3_layers": partial(other_body, "several-layers"),
    **of_features("KINDS"),
    **{name: partial(by_name, name) for name in TEXT_DRAFTERS},
}
