"""The only caller of transformers' `from_pretrained` and `from_config`, which never runs code from a checkpoint.

A folder may hold Python files and name them in `auto_map`, name kernels of the hub, or name weights outside the folder.
Every call here passes trust_remote_code=False, so that transformers neither runs such code nor asks the user. Configs
are read without `LOADER_FIELDS`, by which a file could choose the code that loads it. transformers and torch are
imported only when a function needs them.
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
"""Fields of config.json that would make transformers load another file, kernel or package; the model's layers and
weights do not depend on these fields.
"""


def read_config(folder: str | Path) -> "PretrainedConfig":
    """Reads a folder's configuration into transformers' class for its model_type.

    Raises:
        ModelCheckpointError: the file cannot be read, transformers has no class for the model_type, or the class
            refuses a field. The message is one line.
    """
    folder = Path(folder)
    return make_config(read_fields(folder / "config.json"), folder)


def make_config(fields: Mapping[str, Any], folder: Path, name: str | None = None) -> "PretrainedConfig":
    """Builds a configuration from fields that were read from a folder.

    Args:
        name: name used in errors; None uses the file's path.

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
    # transformers adjusts the fields of a file before passing the fields to the class, so the fields are written to a
    # file here.
    with one_line(name or str(folder / "config.json")), quiet(), TemporaryDirectory() as place:
        file = Path(place) / "config.json"
        file.write_text(json.dumps(_declared(CONFIG_MAPPING[kind], _data(fields))))
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        config.name_or_path = str(folder)
    return config


def generation_of(folder: str | Path) -> dict[str, Any]:
    """Returns the `from_pretrained` option with the folder's normalised generation config.

    The result is empty if the folder has no generation config.
    """
    from transformers import GenerationConfig

    file = Path(folder) / "generation_config.json"
    return {"generation_config": GenerationConfig.from_dict(read_fields(file))} if file.is_file() else {}


def load_files(auto_class: Any, folder: str | Path | None, **options: Any) -> Any:
    """Loads a folder with a class of transformers, which may be an Auto class; GGUF weights are dequantised.

    Args:
        folder: None if `options` contain the weights.
        options: further options of `from_pretrained`.

    Raises:
        ModelCheckpointError: the files need Python code of their own.
        Exception: any exception that the class raises for malformed files; see `one_line`.
    """
    # Only classes that load models need `gguf_file`; for all others, the folder has files in transformers' format.
    if folder is not None and hasattr(auto_class, "_model_mapping") and (Path(folder) / GGUF_FILE).exists():
        options["gguf_file"] = GGUF_FILE
    with _without_its_code(folder):
        return auto_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)


def build_model(config: "PretrainedConfig", auto_class: Any = None, **options: Any) -> Any:
    """Builds a model, by default a causal LM, from a configuration, without loading weights.

    Args:
        options: further options of `from_config`.
    """
    from transformers import AutoModelForCausalLM

    return (auto_class or AutoModelForCausalLM).from_config(config, trust_remote_code=False, **options)


@contextlib.contextmanager
def one_line(name: str) -> Iterator[None]:
    """Converts transformers' exceptions about malformed checkpoints into one line that names the architecture.

    transformers uses fields and tensors before checking them, so a malformed field or tensor can raise nearly any
    exception. Wingbeat's own errors and memory errors, which are not about the checkpoint, pass unchanged.

    Raises:
        ModelCheckpointError: with the architecture's name, and the cause's type and first line.
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
    """Returns the message of an exception, as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences transformers' warnings.

    Warnings are either harmless or raised as errors by checks here.
    """
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
    """Context manager that replaces transformers' advice to trust a checkpoint's code by an error."""
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
    """Returns the fields without `LOADER_FIELDS`, at every depth."""
    return {
        name: _data(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if name not in LOADER_FIELDS
    }


def _declared(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Converts numbers and booleans to the types that a config's class declares.

    The class would refuse 64.0 for an int.
    """
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
    """Substitute for torch in annotations, because a router reads configs without torch."""

    def __getattr__(self, name: str) -> type:
        return object


def _hints(kind: type) -> dict[str, frozenset[Any]]:
    """Returns the declared types of a config class, by field."""
    try:
        hints = typing.get_type_hints(kind, localns={"torch": _Torch()})
    except (NameError, TypeError):  # some annotations can be resolved only by type checkers
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
