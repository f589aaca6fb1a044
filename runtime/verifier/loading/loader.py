"""Loads any Hugging Face causal LM as the verifier: load, probe, switch to paged attention."""

import logging
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from wingbeat.runtime.hugging_face import one_line
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.refusals import Feature, problem
from wingbeat.runtime.tensor_files import stored_dtype, weight_files
from wingbeat.runtime.verifier.checkpoints.checkpoint import Place, check_files, check_finite, load_weights
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, load_config
from wingbeat.runtime.verifier.layers.architecture_checks import (
    check_architecture,
    check_cache,
    check_keywords,
    position_limit,
)
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.layers.division import Division
from wingbeat.runtime.verifier.layers.kept_logits import keep_logits
from wingbeat.runtime.verifier.layers.linears import lay_out_linears, widen_logits
from wingbeat.runtime.verifier.layers.loaded_model import (
    LoadedModel,
    decoder_layers,
    end_of_text_ids,
    num_words,
)
from wingbeat.runtime.verifier.layers.model_part import Remembered
from wingbeat.runtime.verifier.layers.probe import ProbedAttention, probe_attention
from wingbeat.runtime.verifier.layers.query_scales import keep_query_scales
from wingbeat.runtime.verifier.layers.rows_alike import rows_alike
from wingbeat.runtime.verifier.loading.mapped_files import copy_what_stays, give_back_freed
from wingbeat.runtime.verifier_errors import BackendLost, UnsupportedModelError

logger = logging.getLogger(__name__)

ASKED_INT8 = "dtype is int8"


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
    eight_bits: bool = False,
    packed: bool = True,
) -> LoadedModel:
    """Loads a checkpoint directory and prepares it for the runner.

    Args:
        packed: whether quantised weights stay packed, if the device has kernels that multiply by packed weights.
        deterministic, eight_bits: see `prepare_model`.

    Raises:
        ModelCheckpointError: a file, field or tensor is wrong; the message is one line that names the file, field or
            tensor.
        UnsupportedModelError: see `prepare_model`.
    """
    file = ConfigFile.read(Path(path))
    load_config(file)
    check_files(file)
    if eight_bits and file.quantization is not None:
        raise UnsupportedModelError(problem({Feature.INT8: ASKED_INT8, Feature.QUANTISED: f"{file.name} is quantised"}))
    num_bytes = sum(one.stat().st_size for one in weight_files(file.folder))
    shown, stored = str(dtype).removeprefix("torch."), stored_dtype(file.folder)
    stored = "" if stored is None else f"{stored} "
    logger.info("reading %.1f GB of %sweights of %s, to run in %s", num_bytes / 1e9, stored, file.name, shown)
    model = load_weights(file, dtype, Place(device, dtype) if packed else None, device).to(device)
    copy_what_stays(model)
    check_finite(model)
    with one_line(file.name):
        loaded = prepare_model(
            model, Path(path).name, deterministic=deterministic, eight_bits=eight_bits, folder=file.folder
        )
    give_back_freed()
    return loaded


def prepare_model(
    model: PreTrainedModel,
    name: str,
    division: Division | None = None,
    deterministic: bool = False,
    eight_bits: bool = False,
    folder: Path | None = None,
) -> LoadedModel:
    """Probes a model's attention and switches to paged attention; runtime parts test the model before and after.

    Args:
        division: group of processes among which layers are divided; each process prepares its shard. None for a whole
            model.
        deterministic: whether a row's bits must be independent of the other rows in its pass; needs a whole model.
        eight_bits: whether the weights of linear layers are rounded to eight bits first; needs a whole model.
        folder: the model's checkpoint; None if there is none.

    Raises:
        UnsupportedModelError: the model would be served incorrectly or not at all; the message is one line with
            architecture and reason.
    """
    stage = "its layers cannot be probed"
    try:
        model.eval().requires_grad_(False)
        check_architecture(model)
        if deterministic:
            rows_alike(model.device).check(model)
        kinds = check_cache(model)
        check_keywords(model)
        probed = probe_attention(model, position_limit(model), kinds.without_attention)
        stage = "transformers' own generate() fails on it"
        if eight_bits:
            _round_linears(model, decoder_layers(model, len(probed.layers)))
        trial = first_result("model_trial", model, probed, division, deterministic, folder)
        stage = "it fails under our attention function"
        loaded = switch_model(model, name, probed, kinds.remembered, division, deterministic)
        loaded.eight_bits = eight_bits
        if trial is not None:
            trial.check(loaded)
    except (torch.OutOfMemoryError, MemoryError, BackendLost):
        raise
    except UnsupportedModelError as error:
        rounded = f" ({ASKED_INT8})" if eight_bits else ""
        raise UnsupportedModelError(f"{type(model).__name__}: {error}{rounded}") from error
    except Exception as error:
        # Modeling code can raise any exception when its shape assumptions are violated.
        raise UnsupportedModelError(f"{type(model).__name__}: {stage}: {_cause(error)}") from error
    return loaded


def _round_linears(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    """Rounds weights with the first runtime part that supports rounding.

    Raises:
        UnsupportedModelError: no part supports rounding; the message does not contain the model's name.
    """
    if not hooks("round_linears"):
        raise UnsupportedModelError(f"{ASKED_INT8}, but this installation has no kernels for int8 weights")
    hooks("round_linears")[0](model, layers)


def switch_model(
    model: PreTrainedModel,
    name: str,
    probed: ProbedAttention,
    remembered: Remembered | None,
    division: Division | None,
    deterministic: bool,
    fast: bool = True,
) -> LoadedModel:
    """Switches a model to paged attention and to layer states kept by the runtime, and applies the parts' speed-ups.

    Args:
        fast: whether speed-ups are applied; False leaves layers as transformers wrote them.
    """
    config = model.config.get_text_config()
    model.set_attn_implementation(ATTENTION_NAME)
    keep_query_scales(model, probed.max_positions)
    for choose in hooks("choose_experts"):
        choose(model)
    layers = decoder_layers(model, len(probed.layers))
    if fast:
        lay_out_linears(model, deterministic)
        for fuse in hooks("fuse_layers"):
            fuse(model, layers, probed.layers, deterministic, division)
    if fast and division is None:
        widen_logits(model)
        for finish in hooks("finish_layers"):
            finish(model, layers)
    keep_logits(model)
    if fast and deterministic:
        rows_alike(model.device).make(model, layers)
    loaded = LoadedModel(
        model=model,
        name=name,
        layers=probed.layers,
        decoder_layers=layers,
        hidden_size=config.hidden_size,
        vocab_size=num_words(model.get_output_embeddings()),
        max_position_embeddings=probed.max_positions,
        eos_token_ids=end_of_text_ids(model),
        deterministic=deterministic,
    )
    if remembered is not None:
        loaded.add(remembered.install(model, ATTENTION_NAME, division is None))
    return loaded


def _cause(error: Exception) -> str:
    """Returns the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
