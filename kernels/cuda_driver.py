"""Calls of CUDA's driver, whose library is opened here alone."""

import ctypes
import functools


class CudaError(RuntimeError):
    """A CUDA call failed. The message is one line that names the call and CUDA's own reason."""


def call_driver(name: str, *arguments: object) -> None:
    """Calls a function of the driver.

    Raises:
        CudaError: the library cannot be opened or lacks the function, or the driver refuses the call.
    """
    driver = _library()
    function = getattr(driver, name, None)
    if function is None:
        raise CudaError(f"this driver is too old for {name}")
    if status := function(*arguments):
        reason = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(reason))
        raise CudaError(f"{name} failed: {(reason.value or b'unknown error').decode()} (CUresult {status})")


@functools.cache
def _library() -> ctypes.CDLL:
    """The driver's library, which torch has loaded."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the driver's library cannot be opened: {error}") from None
