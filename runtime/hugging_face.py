"""The only place that calls transformers' `from_pretrained` and `from_config`: nothing that a checkpoint brings is run.

A folder may hold Python files and name them in `auto_map`, name kernels of the hub, or weights beside its own files.
Here every call says that no code is trusted, so that transformers runs none and asks nobody, and configs are read
without the fields by which a file would choose how it is loaded. Imports transformers and torch when called.
"""

import contextlib
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from wingbeat.runtime.tensor_files import GGUF_FILE, ModelCheckpointError, read_fields

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CODE = "auto_map"
LOADER_FIELDS = frozenset(
    {
        *(_CODE, "configuration_files", "transformers_weights", "fusion_config", "distributed_config", "use_kernels"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "attn_impl"),
        *("_attn_implementation_autoset", "_flash_attn_2_enabled", "use_flash_attention_2", "_experts_implementation"),
        *("experts_implementation", "_experts_implementation_internal", "kernel_config"),
    }
)
"""Fields of a config.json by which transformers would load another file, a kernel or a package; the model's layers
and weights do not depend on them."""


def read_config(folder: str | Path) -> "PretrainedConfig":
    """The configuration of a folder as transformers' class for its model_type holds it.

    Raises:
        ModelCheckpointError: the file cannot be read, its model_type is of no class in transformers, or the class
            refuses a field; one line.
    """
    folder = Path(folder)
    return make_config(read_fields(folder / "config.json"), folder)


def make_config(fields: Mapping[str, Any], folder: Path, name: str | None = None) -> "PretrainedConfig":
    """The configuration of fields that were read from a folder.

    Args:
        name: in errors; None is the file's.

    Raises:
        ModelCheckpointError: as `read_config`.
    """
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = fields.get("model_type")
    if kind not in CONFIG_MAPPING:
        code = "; its own code (auto_map) is never run" if _CODE in fields else ""
        raise ModelCheckpointError(
            f"{folder}: transformers {transformers.__version__} knows no model_type {kind!r}{code}"
        )
    # transformers has rules of its own between the file and the class, so that it gets a file.
    with one_line(name or str(folder / "config.json")), quiet(), TemporaryDirectory() as place:
        file = Path(place) / "config.json"
        file.write_text(json.dumps(_declared(CONFIG_MAPPING[kind], _data(fields))))
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        config.name_or_path = str(folder)
    return config


def generation_of(folder: str | Path) -> dict[str, Any]:
    """The option of a model's `from_pretrained` that gives it the folder's generation config, with the values that were
    meant; empty where the folder has none."""
    from transformers import GenerationConfig

    file = Path(folder) / "generation_config.json"
    return {"generation_config": GenerationConfig.from_dict(read_fields(file))} if file.is_file() else {}


def load_files(auto_class: Any, folder: str | Path | None, **options: Any) -> Any:
    """Object that a class of transformers, or an Auto class, makes of a folder's files; a model of a GGUF file has the
    numbers that its weights stand for.

    Args:
        folder: None where `options` hold the weights.
        options: others of `from_pretrained`.

    Raises:
        ModelCheckpointError: the files need code of their own.
        Exception: whatever else the class raises about odd files; see `one_line`.
    """
    # Other classes read what the folder has in transformers' own form.
    if folder is not None and hasattr(auto_class, "_model_mapping") and (Path(folder) / GGUF_FILE).exists():
        options["gguf_file"] = GGUF_FILE
    with _without_its_code(folder):
        return auto_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)


def build_model(config: "PretrainedConfig", auto_class: Any = None, **options: Any) -> Any:
    """A model of a configuration without a checkpoint's weights, by default a causal LM.

    Args:
        options: others of `from_config`.
    """
    from transformers import AutoModelForCausalLM

    return (auto_class or AutoModelForCausalLM).from_config(config, trust_remote_code=False, **options)


@contextlib.contextmanager
def one_line(name: str) -> Iterator[None]:
    """Turn whatever transformers raises about an odd checkpoint into one line that names the architecture.

    transformers computes with fields and tensors before it checks them, so that nearly any exception can come of a bad
    one. Wingbeat's own errors pass, as do those of memory, which say nothing about the checkpoint.

    Raises:
        ModelCheckpointError: of the architecture's name, and of the cause's kind and first line.
    """
    try:
        yield
    except (ModelCheckpointError, MemoryError):
        raise
    except ImportError as error:
        raise ModelCheckpointError(f"{name} needs a package that is not installed: {first_line(error)}") from error
    except Exception as error:
        if type(error).__module__.startswith("wingbeat."):
            raise
        if isinstance(error, KeyError):
            raise ModelCheckpointError(f"{name} cannot be loaded: config.json names or lacks {error}") from error
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        raise ModelCheckpointError(f"{name} cannot be loaded: {kind}{first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Message of an exception, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no progress bars of transformers: what it warns of is an error here, or harmless."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _without_its_code(folder: str | Path | None) -> Iterator[None]:
    """Says that code is never run, where transformers advises to trust it."""
    try:
        yield
    except (ValueError, OSError) as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelCheckpointError(
            f"{folder} needs its own code (auto_map), which is never run: give files that transformers reads by its "
            "own classes"
        ) from error


def _data(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields without those that choose how files are loaded, at every depth."""
    return {
        name: _data(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in LOADER_FIELDS
    }


def _declared(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and booleans of the types that a config's class declares, which refuses 64.0 or 1 where it has others."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    hints, parts, made = _hints(kind), getattr(kind, "sub_configs", {}), {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            inner = value.get("model_type")
            part = CONFIG_MAPPING[inner] if inner in CONFIG_MAPPING else parts.get(name)
            made[name] = dict(value) if part is None else _declared(part, value)
        else:
            made[name] = _of_type(value, hints.get(name, frozenset()))
    return made


class _Torch:
    """Stands for torch in annotations: a router reads configs without it."""

    def __getattr__(self, name: str) -> type:
        return object


def _hints(kind: type) -> dict[str, frozenset[Any]]:
    """By field of a config's class, the types that it declares."""
    try:
        hints = typing.get_type_hints(kind, localns={"torch": _Torch()})
    except (NameError, TypeError):  # an annotation that only a type checker reads
        return {}
    return {name: frozenset(typing.get_args(hint) or (hint,)) for name, hint in hints.items()}


def _of_type(value: Any, types: frozenset[Any]) -> Any:
    if isinstance(value, str) and value.strip().lower() in ("null", "none"):
        return None if type(None) in types and str not in types else value
    if isinstance(value, bool) or not isinstance(value, int | float) or type(value) in types:
        return value
    if int in types and float(value).is_integer():
        return int(value)
    if float in types:
        return float(value)
    return bool(value) if bool in types and value in (0, 1) else value
