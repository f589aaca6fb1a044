"""Runs an exported ONNX graph with ONNX Runtime on a CPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.tensorrt.session import EngineError, EngineLoadError, EngineStage, TensorSpec, check_tensors

_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(int64)": torch.int64,
    "tensor(bool)": torch.bool,
}
_ONNX_TYPES = {torch.float32: 1, torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.bfloat16: 16}
_ERRORS_ONLY = 3


class OnnxSession:
    """An `EngineSession` over an ONNX file.

    Args:
        file: ONNX file; its external data must be in the same folder.
        threads: number of threads of ONNX Runtime.

    Raises:
        EngineLoadError: ONNX Runtime is not installed, or cannot load the file.
    """

    device = torch.device("cpu")

    def __init__(self, file: Path, threads: int = 1) -> None:
        runtime = _onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, _ERRORS_ONLY
        try:
            self._session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        # any exception, because ONNX Runtime's exception classes exist only in its compiled module
        except Exception as error:
            raise EngineLoadError(f"{file}: ONNX Runtime {runtime.__version__} refuses it: {_line(error)}") from error
        self.inputs = {part.name: _spec(part) for part in self._session.get_inputs()}
        self.outputs = {part.name: _spec(part) for part in self._session.get_outputs()}
        self._bound: dict[EngineStage, tuple[Any, Mapping[str, Tensor]]] = {}

    def bind(self, stage: EngineStage, tensors: Mapping[str, Tensor]) -> None:
        """See `EngineSession.bind`."""
        check_tensors(self, tensors)
        binding = self._session.io_binding()
        for names, bind in ((self.inputs, binding.bind_input), (self.outputs, binding.bind_output)):
            for name in names:
                tensor = tensors[name]
                bind(name, "cpu", 0, _ONNX_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        # This object keeps the tensors alive, because the binding holds only their addresses.
        self._bound[stage] = binding, tensors

    def keep_bound(self, stage: EngineStage) -> None:
        """See `EngineSession.keep_bound`. Does nothing, because nothing is captured on a CPU."""

    def enqueue(self, stage: EngineStage) -> None:
        """See `EngineSession.enqueue`."""
        try:
            self._session.run_with_iobinding(self._bound[stage][0])
        except Exception as error:
            raise EngineError(f"stage {stage}: ONNX Runtime failed: {_line(error)}") from error


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineLoadError("onnxruntime is not installed: pip install 'wingbeat[onnx]'") from error
    return onnxruntime


def _spec(part: Any) -> TensorSpec:
    return TensorSpec(_DTYPES[part.type], tuple(-1 if size is None else size for size in part.shape))


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
