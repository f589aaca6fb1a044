"""The builders of TensorRT and TensorRT-RTX. The two libraries have the same interface under two module names, and are
imported on demand.

TensorRT builds for the GPU of this machine. TensorRT-RTX builds without a GPU, for given compute capabilities.
"""

import ctypes
import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from wingbeat.runtime.tensorrt.graph_shapes import Profile, input_shapes
from wingbeat.runtime.tensorrt.session import EngineStage

logger = logging.getLogger(__name__)

BUILDERS = ("tensorrt", "tensorrt-rtx")
_RTX_LIBRARIES = ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1")


class BuildError(ValueError):
    """An engine cannot be built; the message is one line that says what is missing, or what the builder reported."""


class EngineBuilder(NamedTuple):
    """An installed builder."""

    name: str
    """Name of the builder, one of BUILDERS."""
    module: ModuleType
    version: str

    def build(
        self,
        onnx_file: Path,
        profiles: Mapping[EngineStage, Profile],
        engine_file: Path,
        compute_capabilities: tuple[str, ...] = (),
        timing_cache: Path | None = None,
    ) -> None:
        """Parse a graph, build a strongly typed engine with one profile per stage, in the order of `profiles`, and
        write the engine to a file.

        Args:
            onnx_file: the graph.
            profiles: shape ranges of each stage.
            engine_file: file to write.
            compute_capabilities: such as "8.9"; empty means this machine's GPU.
            timing_cache: file with the builder's measured times; read if the file exists, and written after the build.

        Raises:
            BuildError: the parser or builder fails; the message names the file, the node or the capability.
        """
        trt, messages = self.module, _Messages(self.module)
        builder = trt.Builder(messages.logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, messages.logger)
        if not parser.parse_from_file(str(onnx_file)):
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            raise BuildError(f"{onnx_file.name}: {self} does not parse it: {_first(str(e.desc()) for e in errors)}")
        config = builder.create_builder_config()
        self._set_capabilities(config, compute_capabilities)
        self._add_profiles(builder, config, network, profiles)
        cache = self._load_cache(config, timing_cache)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError(f"{onnx_file.name}: {self} cannot build it: {messages.first_error()}")
        engine_file.write_bytes(memoryview(plan))
        if cache is not None:
            timing_cache.write_bytes(memoryview(cache.serialize()))

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def _set_capabilities(self, config: Any, names: tuple[str, ...]) -> None:
        kinds = getattr(self.module, "ComputeCapability", None)
        if not names:
            return
        if kinds is None:
            raise BuildError(
                f"compute_capability {', '.join(names)}: {self} can only build for the GPU of this machine"
            )
        known = [name for name in dir(kinds) if name.startswith("SM")]
        config.num_compute_capabilities = len(names)
        for index, name in enumerate(names):
            kind = getattr(kinds, f"SM{name.replace('.', '')}", None)
            if kind is None:
                raise BuildError(f"compute_capability {name}: {self} builds for {', '.join(known)}")
            config.set_compute_capability(kind, index)

    def _add_profiles(self, builder: Any, config: Any, network: Any, profiles: Mapping[EngineStage, Profile]) -> None:
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        shapes = {tensor.name: _named_shape(tensor) for tensor in inputs}
        for stage, sizes in profiles.items():
            profile = builder.create_optimization_profile()
            for name, (least, typical, largest) in input_shapes(sizes, shapes).items():
                profile.set_shape(name, least, typical, largest)
            if config.add_optimization_profile(profile) < 0:
                raise BuildError(f"stage {stage}: {self} refuses the shapes of its profile")

    def _load_cache(self, config: Any, file: Path | None) -> Any:
        if file is None:
            return None
        cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
        return cache if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False) else None


def find_builder(name: str = "auto") -> EngineBuilder:
    """An installed builder; "auto" prefers TensorRT over TensorRT-RTX.

    Args:
        name: "auto" or one of BUILDERS.

    Raises:
        BuildError: no such builder is installed; the message is one line with what to install.
    """
    finders = {"tensorrt": _tensorrt, "tensorrt-rtx": _tensorrt_rtx}
    for kind in BUILDERS if name == "auto" else (name,):
        found = finders[kind]()
        if found is not None:
            return found
    wanted = "neither tensorrt nor tensorrt-rtx is" if name == "auto" else f"{name} is not"
    raise BuildError(
        f"{wanted} installed: pip install 'wingbeat[tensorrt]' for TensorRT on a machine with its GPU, "
        "'wingbeat[tensorrt-rtx]' to build without one, or give --onnx-only"
    )


def _tensorrt() -> EngineBuilder | None:
    try:
        module = import_module("tensorrt")
    except (ImportError, OSError):
        logger.debug("tensorrt cannot be imported", exc_info=True)
        return None
    # In some versions, importing the bindings gives an empty module if the bindings' libraries are missing.
    return EngineBuilder("tensorrt", module, module.__version__) if hasattr(module, "OnnxParser") else None


def _tensorrt_rtx() -> EngineBuilder | None:
    if find_spec("tensorrt_rtx") is not None:
        try:
            module = import_module("tensorrt_rtx")
            return EngineBuilder("tensorrt-rtx", module, module.__version__)
        except (ImportError, OSError, AttributeError):
            logger.debug("tensorrt_rtx cannot be imported", exc_info=True)
    libraries = find_spec("tensorrt_rtx_libs")
    if libraries is None or find_spec("tensorrt_rtx_bindings") is None:
        return None
    [folder] = libraries.submodule_search_locations
    try:
        for library in _RTX_LIBRARIES:
            # The libraries are loaded before the bindings: the bindings look up libraries by name, and so find those
            # that this process has already loaded.
            ctypes.CDLL(str(Path(folder) / library), ctypes.RTLD_GLOBAL)
        module = import_module("tensorrt_rtx_bindings.tensorrt_rtx")
    except (ImportError, OSError):
        logger.debug("tensorrt_rtx_bindings cannot be imported", exc_info=True)
        return None
    return EngineBuilder("tensorrt-rtx", module, _version("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu12-libs"))


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _named_shape(tensor: Any) -> tuple[int | str, ...]:
    """Shape of a network's input, in which free dimensions are names."""
    return tuple(
        tensor.get_dimension_name(index) if size == -1 else size for index, size in enumerate(tuple(tensor.shape))
    )


class _Messages:
    """Collects the error messages that a library logs."""

    def __init__(self, trt: ModuleType) -> None:
        kept = self.errors = []

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.ILogger.Severity.ERROR:
                    kept.append(message)
                else:
                    logger.debug("%s", message)

        self.logger = Logger()

    def first_error(self) -> str:
        return _first(self.errors)


def _first(messages: Any) -> str:
    lines = [" ".join(message.split()) for message in messages]
    return lines[0] if lines else "it gave no reason"
