"""Loads any Hugging Face causal LM as the verifier: load, probe, test, and refuse a model with incorrect results."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from wingbeat.runtime.hugging_face import one_line
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.refusals import Feature, problem
from wingbeat.runtime.tensor_files import weight_files
from wingbeat.runtime.tokenizer import Tokenizer
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
from wingbeat.runtime.verifier.layers.experts import choose_experts
from wingbeat.runtime.verifier.layers.fused import fuse
from wingbeat.runtime.verifier.layers.kept_logits import keep_logits
from wingbeat.runtime.verifier.layers.linears import widen_logits
from wingbeat.runtime.verifier.layers.loaded_model import (
    LoadedModel,
    decoder_layers,
    end_of_text_ids,
    num_words,
)
from wingbeat.runtime.verifier.layers.model_part import Remembered
from wingbeat.runtime.verifier.layers.probe import ProbedAttention, probe_attention
from wingbeat.runtime.verifier.layers.rows_alike import rows_alike
from wingbeat.runtime.verifier.layers.speed_up import speed_up
from wingbeat.runtime.verifier.loading.exact import HALVES, exact_copy
from wingbeat.runtime.verifier.loading.mapped_files import copy_what_stays, give_back_freed
from wingbeat.runtime.verifier.loading.reference import (
    WRITTEN,
    TrialText,
    reference_logits,
    texts_for,
    written_texts,
)
from wingbeat.runtime.verifier.loading.rows_trial import try_rows
from wingbeat.runtime.verifier.loading.trial import try_model
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
    shown = str(dtype).removeprefix("torch.")
    logger.info("reading %.1f GB of weights of %s, to run in %s", num_bytes / 1e9, file.name, shown)
    model = load_weights(file, dtype, Place(device, dtype) if packed else None, device).to(device)
    copy_what_stays(model)
    check_finite(model)
    logger.info("testing %s against transformers' own decoding", file.name)
    with one_line(file.name):
        written = written_tokens(file.folder) if model.dtype in HALVES else []
        loaded = prepare_model(
            model, Path(path).name, deterministic=deterministic, eight_bits=eight_bits, written=written
        )
    give_back_freed()
    return loaded


def written_tokens(folder: Path) -> list[int]:
    """Returns token ids of a natural text; empty if the folder has no readable tokenizer."""
    try:
        tokenizer = Tokenizer.find(folder)
    except ValueError:
        tokenizer = None
    return [] if tokenizer is None else tokenizer.encode(WRITTEN)


def prepare_model(
    model: PreTrainedModel,
    name: str,
    division: Division | None = None,
    deterministic: bool = False,
    eight_bits: bool = False,
    written: Sequence[int] = (),
) -> LoadedModel:
    """Probes a model's attention, switches to paged attention, and compares the model with transformers' decoding.

    Args:
        division: group of processes among which layers are divided; each process prepares its shard. None for a whole
            model.
        deterministic: whether a row's bits must be independent of the other rows in its pass; needs a whole model.
        eight_bits: whether the weights of linear layers are rounded to eight bits first; needs a whole model. The test
            then compares with transformers' decoding on the rounded weights.
        written: token ids of a natural text; a half-precision model is also tested on such text.

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
        texts = texts_for(model, probed)
        refused: dict[str, str] = {}
        if model.dtype in HALVES:
            refused = _try_in_float32(model, probed, texts, division, deterministic)
        references = reference_logits(model, texts)
        if references[0].rounding and written:
            references += reference_logits(model, written_texts(texts, written))
        trial = first_result("open_trial", model, texts, division is None, refused)
        stage = "it fails under our attention function"
        loaded = _switch(model, name, probed, kinds.remembered, division, deterministic)
        loaded.eight_bits = eight_bits
        try_model(loaded, references)
        if deterministic:
            try_rows(loaded, texts)
        if trial is not None:
            trial.serve(loaded)
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


def _try_in_float32(
    model: PreTrainedModel,
    probed: ProbedAttention,
    texts: list[TrialText],
    division: Division | None,
    deterministic: bool,
) -> dict[str, str]:
    """Tests the serving code of a half-precision model on a float32 copy, because rounding could hide mistakes.

    Layers are tested both as transformers wrote them and fused, because the choice of layers to fuse may depend on the
    dtype.

    Returns:
        Reasons why kinds of spans (image, audio) are not served, by kind.

    Raises:
        UnsupportedModelError: as `try_model`.
    """
    copy, count = exact_copy(model, probed.layers)
    is_part = count < len(probed.layers)
    probed = probed._replace(layers=probed.layers[:count])
    try:
        remembered = check_cache(copy).remembered  # the copy's recurrent states are float32 too
        references = reference_logits(copy, texts)
        trial = first_result("open_trial", copy, texts, division is None, {})
    except Exception as error:
        if not is_part or isinstance(error, torch.OutOfMemoryError | MemoryError | BackendLost):
            raise
        logger.info(
            "the first %d layers do not run as a separate float32 model (%s): testing only the whole model",
            count,
            error,
        )
        return {}
    with _unlogged():
        if remembered is None:
            try_model(_switch(copy, "", probed, remembered, division, deterministic, fast=False), references)
        loaded = _switch(copy, "", probed, remembered, division, deterministic)
    try_model(loaded, references)
    refused = {} if trial is None else trial.serve(loaded)
    del copy, loaded, references, trial
    gc.collect()  # the copy's layers are in reference cycles with the objects that run them
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return refused


@contextmanager
def _unlogged() -> Iterator[None]:
    """Context manager that silences logs about the copy's layers, because the model itself logs the same lines."""
    layers = logging.getLogger("wingbeat.runtime.verifier.layers")
    before = layers.level
    layers.setLevel(logging.ERROR)
    try:
        yield
    finally:
        layers.setLevel(before)


def _switch(
    model: PreTrainedModel,
    name: str,
    probed: ProbedAttention,
    remembered: Remembered | None,
    division: Division | None,
    deterministic: bool,
    fast: bool = True,
) -> LoadedModel:
    """Switches a model to paged attention and to layer states kept by the runtime, and applies speed-ups.

    The speed-ups are `speed_up`, `fuse`, and `widen_logits`; `keep_logits` restricts logits to the requested rows.

    Args:
        fast: whether speed-ups are applied; False leaves layers as transformers wrote them.
    """
    config = model.config.get_text_config()
    model.set_attn_implementation(ATTENTION_NAME)
    choose_experts(model)
    layers = decoder_layers(model, len(probed.layers))
    if fast:
        speed_up(model, deterministic)
    if fast:
        fuse(model, layers, probed.layers, deterministic=deterministic, division=division)
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
