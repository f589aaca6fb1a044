"""An engine directory: all files needed to serve a pair from engines; read-only after it is built."""

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.tensorrt.builders import find_builder
from wingbeat.runtime.tensorrt.engine_config import (
    AUDIO,
    BASE,
    DRAFT,
    VISUAL,
    BaseEngineConfig,
    DraftEngineConfig,
    EngineDirectoryError,
    GraphConfig,
    read_engine_config,
)
from wingbeat.runtime.tensorrt.graph_ops import SCATTER_OPSET
from wingbeat.runtime.tensorrt.onnx_session import OnnxSession
from wingbeat.runtime.tensorrt.session import BASE_STAGES, DRAFT_STAGES, ENCODER_STAGES, EngineLoadError, EngineSession

BASE_CONFIG, DRAFT_CONFIG = "base_config.json", "draft_config.json"
DRAFT_TO_TARGET = "d2t.safetensors"
TIMING_CACHE = "timing.cache"
TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


class EngineDirectory:
    """An existing engine directory.

    Raises:
        EngineDirectoryError: the folder is not an engine directory, or a config is invalid; the message names file and
            field.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / BASE_CONFIG).is_file():
            raise EngineDirectoryError(
                f"{folder} holds no {BASE_CONFIG}: make an engine directory with wingbeat build-engine"
            )
        self.folder = folder
        self.base = read_engine_config(folder / BASE_CONFIG, BaseEngineConfig)
        self.draft: DraftEngineConfig | None = None
        if self.base.has_draft_model:
            self.draft = read_engine_config(folder / DRAFT_CONFIG, DraftEngineConfig)
            self._check_pair(self.draft)

    def graph(self, name: str, suffix: str) -> Path:
        """The path of a graph's file, such as `eagle_base.onnx` or `eagle_draft.engine`.

        Raises:
            EngineDirectoryError: the file is missing.
        """
        file = self.folder / f"{name}{suffix}"
        if not file.is_file():
            raise EngineDirectoryError(f"{file} is missing: build it with wingbeat build-engine")
        return file

    def open_session(self, name: str, device: torch.device) -> EngineSession:
        """Open a session of one of the directory's graphs. On a GPU, the library that built the graph's engine runs
        the engine; on a CPU, ONNX Runtime runs the ONNX file.

        Raises:
            EngineDirectoryError: the file is missing.
            EngineLoadError: no installed library can run the file; the message is one line that says what to change.
        """
        if device.type == "cpu":
            return OnnxSession(self.graph(name, ".onnx"), torch.get_num_threads())
        from wingbeat.runtime.tensorrt.tensorrt_session import TensorRTSession

        config = self.draft if name == DRAFT else self.base
        stages = {BASE: BASE_STAGES, DRAFT: DRAFT_STAGES}.get(name, ENCODER_STAGES)
        file = self.graph(name, ".engine")
        if config.opset < SCATTER_OPSET:
            raise EngineLoadError(
                f"{file}: opset is {config.opset}: engines need opset {SCATTER_OPSET} to write KV in place"
            )
        library = find_builder(config.builder or "auto")
        if config.tools.get(library.name, library.version) != library.version:
            raise EngineLoadError(
                f"{file}: {library.name} {config.tools[library.name]} built it, and {library.version} is installed: "
                "install that version or rebuild the engine"
            )
        return TensorRTSession(file, library, stages, device)

    def check_model(self, model: Path) -> None:
        """Check that a checkpoint's weights are those from which the engine was exported; a folder without weights is
        accepted.

        Raises:
            EngineDirectoryError: the checkpoint differs.
        """
        try:
            found = checkpoint_fingerprint(model)
        except FileNotFoundError:
            return
        if found != self.base.weights_fingerprint:
            raise EngineDirectoryError(
                f"{self.folder}: weights_fingerprint is {self.base.weights_fingerprint}, that of {model} is {found}: "
                "the engine was built from another checkpoint"
            )

    def check_files(self, *names: str) -> None:
        """Compare the files of graphs with their recorded digests.

        Args:
            names: BASE or DRAFT; none means both.

        Raises:
            EngineDirectoryError: a file is missing or differs.
        """
        for graph, config_name, config in ((BASE, BASE_CONFIG, self.base), (DRAFT, DRAFT_CONFIG, self.draft)):
            wanted = config is not None and (not names or graph in names)
            for name, digest in config.files.items() if wanted else ():
                file = self.folder / name
                if not file.is_file():
                    raise EngineDirectoryError(f"{file} is missing: {config_name} lists it in files")
                if file_digest(file) != digest:
                    raise EngineDirectoryError(
                        f"{file} differs from the digest in {config_name}, field files: rebuild the directory"
                    )

    def draft_token_ids(self) -> Tensor:
        """int64 [draft_vocab_size]: the target id of each draft id.

        Raises:
            EngineDirectoryError: the file is missing or has another size.
        """
        file = self.folder / DRAFT_TO_TARGET
        try:
            offsets = load_file(file)["d2t"]
        except (OSError, KeyError, ValueError) as error:
            raise EngineDirectoryError(f"{file}: d2t cannot be read: {error}") from error
        if len(offsets) != self.draft.draft_vocab_size:
            raise EngineDirectoryError(
                f"{file}: d2t has {len(offsets)} entries: draft_vocab_size is {self.draft.draft_vocab_size}"
            )
        return offsets + torch.arange(len(offsets))

    def _check_pair(self, draft: DraftEngineConfig) -> None:
        base = self.base
        for name, found, expected in (
            ("base_fingerprint", draft.base_fingerprint, base.weights_fingerprint),
            ("tap_layers", draft.tap_layers, base.tap_layers),
            ("base_model_hidden_size", draft.base_model_hidden_size, base.hidden_states_size),
            ("dtype", draft.dtype, base.dtype),
            ("limits", draft.limits, base.limits),
        ):
            if found != expected:
                raise EngineDirectoryError(
                    f"{self.folder / DRAFT_CONFIG}: {name} is {found}, {BASE_CONFIG} has {expected}: the two were not "
                    "exported together"
                )
        encoder = base.encoder
        for name, found, theirs in (
            ("num_axes", draft.num_axes, 0 if encoder is None else encoder.num_axes),
            ("media_width", draft.media_width, 0 if encoder is None else base.hidden_size),
        ):
            if found not in (0, theirs):
                raise EngineDirectoryError(
                    f"{self.folder / DRAFT_CONFIG}: {name} is {found}, media of {BASE_CONFIG} have {theirs}: the two "
                    "were not exported together"
                )


def write_config(folder: Path, config: GraphConfig) -> None:
    """Write base_config.json or draft_config.json."""
    name = BASE_CONFIG if isinstance(config, BaseEngineConfig) else DRAFT_CONFIG
    (folder / name).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def write_draft_to_target(folder: Path, draft_token_ids: Tensor) -> None:
    """Write d2t.safetensors: the offset from each draft id to its target id."""
    ids = draft_token_ids.cpu()
    save_file({"d2t": (ids - torch.arange(len(ids))).contiguous()}, folder / DRAFT_TO_TARGET)


def copy_tokenizer(model: Path, folder: Path) -> list[str]:
    """Copy a checkpoint's tokenizer, chat template and config; returns the file names."""
    names = [name for name in TOKENIZER_FILES if (model / name).is_file()]
    for name in names:
        shutil.copyfile(model / name, folder / name)
    return names


def file_digest(file: Path) -> str:
    """SHA-256 in hexadecimal."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def clear(folder: Path) -> None:
    """Delete the files of an earlier build, so that the folder never contains the engine of an old graph together with
    a new graph.
    """
    others = (BASE_CONFIG, DRAFT_CONFIG, DRAFT_TO_TARGET, *TOKENIZER_FILES)
    graphs = (name for graph in (BASE, DRAFT, VISUAL, AUDIO) for name in graph_files(folder, graph))
    for name in (*graphs, *others):
        (folder / name).unlink(missing_ok=True)


def graph_files(folder: Path, name: str) -> list[str]:
    """Names of a graph's files: the ONNX file, its external data, the engine."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(f"{name}."))
