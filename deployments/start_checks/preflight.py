"""Checks the address, the settings and the checkpoints' files before Ray starts.

The checks need neither torch nor transformers, which take seconds to import. Errors that only torch or transformers can
find are reported by the engine when it loads the checkpoint.
"""

import errno
import socket
from pathlib import Path
from types import SimpleNamespace

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.bound_socket import bind
from wingbeat.deployments.parts import hooks
from wingbeat.deployments.start_checks.tokenizer_check import check_tokenizer_file
from wingbeat.kernels.parts import load_function
from wingbeat.runtime.drafters.choice import CHECKPOINT, KINDS, holds_modules
from wingbeat.runtime.folder_kinds import head_problem
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_files import read_fields, tensor_files
from wingbeat.runtime.verifier.checkpoints.checkpoint import check_files
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile


class PreflightError(ValueError):
    """The application cannot start; the message is one line that names the setting or the file to change."""


def check(config: AppConfig, host: str, port: int, address: str | None = None, here: bool = True) -> None:
    """Refuses a start that cannot succeed.

    In a cluster given by `address`, Serve may already listen on the port, so the port is not checked.

    Args:
        here: whether the application will run on this machine only; otherwise memory, GPUs and modules are not checked.

    Raises:
        ValueError, OSError: the start cannot succeed; the message is one line that names the setting, the file or the
            tensor.
    """
    if address is None:
        check_address(host, port)
    else:
        _check_cluster(address)
    for one in config.served():
        _check_model(one, here)


def _check_model(config: AppConfig, here: bool) -> None:
    folder = config.model_dir()
    file = ConfigFile.read(folder)
    wingbeats_own = config.engine_factory is None
    check_positions(config, file.name, file.size("max_position_embeddings"))
    if wingbeats_own:
        check_files(file)
        for check_memory in hooks("check_memory") if here else ():
            check_memory(config, file)
    check_tokenizer_file(folder, file.size("vocab_size"))
    for check in hooks("check_before_start"):
        check(config)
    _check_drafter_name(config, here)
    choice = config.choice()
    if wingbeats_own and config.drafter_factory is None and choice.kind == CHECKPOINT:
        _check_head(Path(choice.source), choice.label, file)


def check_address(host: str, port: int) -> None:
    """Refuses an address that is in use or that this process may not bind.

    Raises:
        PreflightError: the address cannot be used; the message is one line with the reason.
    """
    try:
        bind(host, port).close()
    except socket.gaierror as error:
        raise PreflightError(f"host {host} cannot be resolved: {error.strerror or error}") from error
    except OSError as error:
        raise PreflightError(_why_unbound(error, host, port)) from error


def _why_unbound(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another server: end that one, or give another --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} may not be used by this user: give a --port from 1024 on"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host} is not an address of this machine: give another --host"
    return f"cannot listen on port {port} of {host}: {error.strerror or error}"


def _check_cluster(address: str) -> None:
    if "://" in address:
        raise PreflightError(
            f"--address {address}: Ray's client cannot serve; run this on a node of the cluster, with HOST:PORT or auto"
        )
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdigit()):
        raise PreflightError(f"--address {address}: must be HOST:PORT of the cluster's head, or auto")


def check_positions(config: AppConfig, name: str, num_positions: int | None) -> None:
    """Refuses a `max_model_len` above `num_positions`, the model's maximum number of positions. If `num_positions` is
    None, nothing is checked.

    Raises:
        PreflightError: the setting is above `num_positions`; the message is one line with both numbers.
    """
    if num_positions is not None and (config.max_model_len or 0) > num_positions:
        raise PreflightError(
            f"max_model_len is {config.max_model_len}: {name} has {num_positions} positions; lower it to that"
        )


def _check_head(folder: Path, label: str, model: ConfigFile) -> None:
    """Refuses a draft head whose config.json names other sizes than the model's; the engine compares tensor shapes."""
    if not (folder / "config.json").is_file() or head_problem(folder, tensor_files(folder)) is None:
        return
    sizes = {name: model.size(name) for name in ("hidden_size", "vocab_size")}
    target = SimpleNamespace(**sizes, num_layers=model.size("num_hidden_layers"))
    if (words := first_result("another_verifier", read_fields(folder / "config.json"), {}, target)) is not None:
        raise PreflightError(f"drafter {label}: {words}")


def _check_drafter_name(config: AppConfig, here: bool) -> None:
    """Checks a drafter for mistakes that can be found without imports."""
    choice = config.choice()
    kind = KINDS.get(choice.kind)
    # A user's class can be checked only if the application runs on this machine.
    if kind is None or config.drafter_factory is not None or (choice.is_class and not here):
        return
    if kind.find_problem is not None and (problem := load_function(kind.find_problem)(choice.source)) is not None:
        raise PreflightError(f"drafter {choice.source}: {problem}")
    if kind.modules is not None and not holds_modules(kind, config.model_dir()):
        name = kind.name
        raise PreflightError(f"drafter is {name!r}: {config.model_dir()} has no {name.upper()} module that can be read")
