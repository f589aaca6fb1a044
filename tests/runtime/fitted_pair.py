"""A random verifier and a head that is right for it without training: its weights solve for the verifier's own text."""

import json
from pathlib import Path

import torch
from torch.nn import functional

from tests.runtime.models import VOCAB_SIZE, engine_config, generate, random_model
from wingbeat.runtime.engine_checks.trial_prompts import trial_prompts
from wingbeat.runtime.heads.conventions import STATED
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import LoadedModel, prepare_model
from wingbeat.runtime.verifier.model import VerifierModel

NUM_LAYERS = 8
TAPS = (3, 5, 6)
"""Tapped layers, each one after a layer that a head taps by default."""
_NUM_TOKENS = 32


def fitted_pair(folder: Path) -> tuple[Path, Path]:
    """Write a verifier and its head, whose first drafted token is mostly right, and later ones never.

    The head's layer adds nothing, so that its logits are linear in the taps: the least-squares solution for the texts
    that a trial writes. A layer further up or down the solution means nothing.
    """
    model = random_model("llama", num_hidden_layers=NUM_LAYERS)
    model.save_pretrained(folder / "verifier")
    save_eagle_head(_fitted_head(prepare_model(model, "verifier")), folder / "head")
    return folder / "verifier", folder / "head"


def rewrite_config(head: Path, into: Path, **fields) -> Path:
    """Copy a head's folder with other fields in its config; None removes a field."""
    into.mkdir()
    (into / "model.safetensors").symlink_to(head / "model.safetensors")
    config = json.loads((head / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (into / "config.json").write_text(json.dumps(config))
    return into


def as_specforge(head: Path, into: Path, ids: tuple[int, ...] | None, **fields) -> Path:
    """Copy a head as SpecForge writes it: tapped layers by ids, which may be missing, and no stated convention."""
    eagle_config = {"use_aux_hidden_state": True}
    if ids is not None:
        eagle_config["eagle_aux_hidden_state_layer_ids"] = list(ids)
    return rewrite_config(head, into, **{STATED: None, "eagle_config": eagle_config, **fields})


def _fitted_head(loaded: LoadedModel) -> EagleHead:
    prompts = trial_prompts(loaded, None)
    params = [
        SamplingParams(max_tokens=_NUM_TOKENS, temperature=float(turn), seed=turn * len(prompts) + row, ignore_eos=True)
        for turn in range(2)
        for row in range(len(prompts))
    ]
    texts, _ = generate(loaded, engine_config(), None, prompts * 2, params)
    token_ids = torch.tensor([prompt + text for prompt, text in zip(prompts * 2, texts, strict=True)])
    model = VerifierModel(loaded, TAPS)
    taps = model.observe(token_ids)
    model.remove_taps()
    inputs = taps[:, 1:-2].flatten(0, 1).double()
    wanted = functional.one_hot(token_ids[:, 3:], VOCAB_SIZE).flatten(0, 1).double()
    ridge = 1e-3 * torch.eye(inputs.shape[1], dtype=torch.float64)
    solution = torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ wanted)
    head = EagleHead(
        EagleHeadConfig(
            hidden_size=100,
            intermediate_size=8,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            target_hidden_size=loaded.hidden_size,
            tap_layers=TAPS,
            vocab_size=VOCAB_SIZE,
            draft_vocab_size=VOCAB_SIZE,
        )
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(float(parameter.dim() == 1))  # weights of norms are 1, all others 0
        head.fc.weight[:VOCAB_SIZE] = solution.T
        head.lm_head.weight[:, :VOCAB_SIZE] = torch.eye(VOCAB_SIZE)
    return head
