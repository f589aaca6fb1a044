"""Runs a built engine on a GPU: one execution context per stage, addresses and shapes bound by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.tensorrt.builders import EngineBuilder
from wingbeat.runtime.tensorrt.session import EngineError, EngineLoadError, EngineStage, TensorSpec, check_tensors


class TensorRTSession:
    """An `EngineSession` over a serialized engine.

    Args:
        file: the engine.
        library: the library that built the engine and that also runs it.
        stages: stages in the order of the engine's profiles.
        device: GPU to run on.

    Raises:
        EngineLoadError: there is no CUDA device, or the engine was not built for its GPU.
    """

    def __init__(self, file: Path, library: EngineBuilder, stages: Sequence[EngineStage], device: torch.device) -> None:
        # The device is checked first, because without a CUDA device the deserialization would abort the process.
        if device.type != "cuda" or not torch.cuda.is_available():
            raise EngineLoadError(
                f"{file}: an engine needs a CUDA device, but the device is {device}; use --device cpu"
            )
        trt = library.module
        self.device = device
        self._file = file
        self._trt_logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._trt_logger)
        self._engine = self._runtime.deserialize_cuda_engine(file.read_bytes())
        if self._engine is None:
            raise EngineLoadError(
                f"{file}: {library} cannot read it on {torch.cuda.get_device_name(device)}: rebuild it"
            )
        if self._engine.num_optimization_profiles != len(stages):
            raise EngineLoadError(
                f"{file}: {self._engine.num_optimization_profiles} profiles, {len(stages)} stages expected"
            )
        self.inputs, self.outputs = _specs(trt, self._engine)
        self._profiles = {stage: index for index, stage in enumerate(stages)}
        self._contexts: dict[EngineStage, Any] = {}
        self._kept: list[Any] = []

    def bind(self, stage: EngineStage, tensors: Mapping[str, Tensor]) -> None:
        """See `EngineSession.bind`."""
        check_tensors(self, tensors)
        context = self._context(stage)
        for name, tensor in tensors.items():
            if name in self.inputs and not context.set_input_shape(name, tuple(tensor.shape)):
                raise EngineError(
                    f"stage {stage}: {name} {list(tensor.shape)} is outside the profile of {self._file.name}"
                )
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise EngineError(f"stage {stage}: {name} cannot be bound in {self._file.name}")

    def enqueue(self, stage: EngineStage) -> None:
        """See `EngineSession.enqueue`."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if not self._contexts[stage].execute_async_v3(stream):
            raise EngineError(f"stage {stage} of {self._file.name} cannot be enqueued")

    def keep_bound(self, stage: EngineStage) -> None:
        """See `EngineSession.keep_bound`."""
        self._kept.append(self._contexts.pop(stage))

    def _context(self, stage: EngineStage) -> Any:
        if stage not in self._contexts:
            context = self._engine.create_execution_context()
            if context is None:
                raise EngineError(f"stage {stage} of {self._file.name}: no memory for its execution context")
            stream = torch.cuda.current_stream(self.device)
            context.set_optimization_profile_async(self._profiles[stage], stream.cuda_stream)
            stream.synchronize()
            self._contexts[stage] = context
        return self._contexts[stage]


def _specs(trt: Any, engine: Any) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    dtypes = {
        trt.DataType.FLOAT: torch.float32,
        trt.DataType.HALF: torch.float16,
        trt.DataType.BF16: torch.bfloat16,
        trt.DataType.INT64: torch.int64,
        trt.DataType.BOOL: torch.bool,
    }
    inputs, outputs = {}, {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        part = inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs
        part[name] = TensorSpec(dtypes[engine.get_tensor_dtype(name)], tuple(engine.get_tensor_shape(name)))
    return inputs, outputs
