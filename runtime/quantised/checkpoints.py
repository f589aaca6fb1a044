"""Quantised checkpoints, served by the weights that their numbers stand for.

Every weight becomes a number of the model's dtype while it is loaded, by transformers' own quantisers where these can
do it. Then a row's products do not depend on the rows beside it, as those of some quantised kernels do (LLM.int8 takes
the outliers of a whole batch), and a model needs no kernel of its device. It takes the memory of a plain one.
"""

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.runtime.hugging_face import generation_of, make_config
from wingbeat.runtime.tensor_files import ModelCheckpointError, weight_files
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile, auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Loaded = tuple[PreTrainedModel, Mapping[str, Any]]
    Load = Callable[..., Loaded]

logger = logging.getLogger(__name__)


def check_quantiser(config: ConfigFile) -> None:
    """Refuse a quantisation that is not read here: transformers would skip an unknown one and take packed numbers.

    Raises:
        ModelCheckpointError: names those that are read, or the package that is missing.
    """
    method = config.quantiser
    if method not in _QUANTISERS:
        raise ModelCheckpointError(
            f"{config.name} is quantised by {method!r}, which is not served: {', '.join(_QUANTISERS)} are"
        )
    package = _QUANTISERS[method].package
    if package is not None and find_spec(package.replace("-", "_")) is None:
        raise ModelCheckpointError(
            f"{config.name} is quantised by {method}: install {package} (pip install 'wingbeat[quantised]')"
        )


def load_dequantised(config: ConfigFile, load: "Load") -> "Loaded":
    """A quantised checkpoint as a plain model, with transformers' report of what was loaded.

    Args:
        config: quantised in a way that `check_quantiser` has passed.
        load: `from_pretrained` of the folder, which takes more options.

    Raises:
        ModelCheckpointError: the numbers are packed in a way that is not read here.
    """
    model, info = _QUANTISERS[config.quantiser].load(config, load)
    _make_plain(model)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    logger.info("%s: weights quantised by %s are held in %s", config.name, config.quantiser, model.config.dtype)
    return model, info


def _make_plain(model: "PreTrainedModel") -> None:
    """Parameters of the model's dtype, but those that it keeps in float32; shared ones stay shared."""
    import torch

    dtype, made = model.config.dtype, {}
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype == torch.bfloat16 else set()
    if dtype == torch.float16:
        kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                held = parameter.data
                plain = held if type(held) is torch.Tensor else held.dequantize()
                if not any(part in f"{prefix}.{name}" for part in kept):
                    plain = plain.to(dtype)
                # Some were made where gradients are off for good.
                made[id(parameter)] = torch.nn.Parameter(plain.clone() if plain.is_inference() else plain, False)
            setattr(module, name, made[id(parameter)])


def _by_option(config_class: str, **options: Any) -> "Callable[[ConfigFile, Load], Loaded]":
    """By transformers, tensor for tensor."""

    def loaded(config: ConfigFile, load: "Load") -> "Loaded":
        import transformers

        return load(quantization_config=getattr(transformers, config_class)(**options))

    return loaded


def _as_they_are(config: ConfigFile, load: "Load") -> "Loaded":
    """Tensors that know their numbers."""
    return load()


def _bitsandbytes(config: ConfigFile, load: "Load") -> "Loaded":
    model, info = load()
    return model.dequantize(model.config.dtype), info


def _packed_integers(config: ConfigFile, load: "Load") -> "Loaded":
    """By ourselves: the package that transformers leaves it to asks for a newer torch than is served with."""
    from safetensors.torch import load_file

    from wingbeat.runtime.verifier.checkpoints.packed_integers import unpack_linears

    files = weight_files(config.folder)
    if files[0].suffix != ".safetensors":
        raise ModelCheckpointError(f"{files[0]}: {config.quantiser} is read from safetensors files; convert it to one")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    plain = make_config(config.fields, config.folder, config.name)
    del plain.quantization_config
    model, info = load(
        auto_class(plain.model_type)._model_mapping[type(plain)],
        None,
        config=plain,
        state_dict=unpack_linears(tensors, config.quantization),
    )
    if (config.folder / "generation_config.json").is_file():
        model.generation_config = generation_of(config.folder)["generation_config"]
    return model, info


def _gguf(config: ConfigFile, load: "Load") -> "Loaded":
    from wingbeat.runtime.quantised.gguf_weights import load_gguf

    return load_gguf(config, load)


class _Quantiser(NamedTuple):
    """How one kind of checkpoint is read."""

    load: "Callable[[ConfigFile, Load], Loaded]"
    package: str | None = None
    """What has to be installed for it."""


_QUANTISERS = {
    "awq": _Quantiser(_packed_integers),
    "bitsandbytes": _Quantiser(_bitsandbytes, "bitsandbytes"),
    "compressed-tensors": _Quantiser(_by_option("CompressedTensorsConfig", run_compressed=False), "compressed-tensors"),
    "fp8": _Quantiser(_by_option("FineGrainedFP8Config", dequantize=True)),
    "gguf": _Quantiser(_gguf, "gguf"),
    "gptq": _Quantiser(_packed_integers),
    "mxfp4": _Quantiser(_by_option("Mxfp4Config", dequantize=True)),
    "torchao": _Quantiser(_as_they_are, "torchao"),
}
