"""Checks the address, the settings and the checkpoints' files before Ray starts.

The checks need neither torch nor transformers, which take seconds to import. Errors that only torch or transformers can
find are reported by the engine when it loads the checkpoint.
"""

import errno
import os
import socket
from pathlib import Path

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.door import bind
from wingbeat.deployments.parts import hooks
from wingbeat.kernels.parts import load_function
from wingbeat.runtime.drafters.choice import KINDS, DrafterChoice, holds_modules
from wingbeat.runtime.tokenizer_file import check_tokenizer_file
from wingbeat.runtime.verifier.checkpoints.checkpoint import check_files
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile


class PreflightError(ValueError):
    """The application cannot start; the message is one line that names the setting or the file to change."""


def check(config: AppConfig, host: str, port: int, address: str | None = None) -> None:
    """Refuses a start that cannot succeed.

    If a running cluster is joined, memory, GPUs and modules are not checked, because the application may run on other
    machines. In a cluster given by `address`, Serve may already listen on the port, so the port is not checked either.

    Raises:
        ValueError, OSError: the start cannot succeed; the message is one line that names the setting, the file or the
            tensor.
    """
    if address is None:
        check_address(host, port)
    else:
        _check_cluster(address)
    for one in config.served():
        _check_model(one, is_here(address))


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


def _check_drafter_name(config: AppConfig, here: bool) -> None:
    """Checks a drafter for mistakes that can be found without imports."""
    choice = config.choice()
    if not drafter_is_ours(config, choice, here):
        return
    kind = KINDS.get(choice.kind)
    if kind is None:
        return
    if kind.find_problem is not None and (problem := load_function(kind.find_problem)(choice.source)) is not None:
        raise PreflightError(f"drafter {choice.source}: {problem}")
    if kind.modules is not None and not holds_modules(kind, config.model_dir()):
        name = kind.name
        raise PreflightError(f"drafter is {name!r}: {config.model_dir()} has no {name.upper()} module that can be read")


def drafter_is_ours(config: AppConfig, choice: DrafterChoice, here: bool) -> bool:
    """Returns whether the drafter can be checked on this machine.

    A drafter from a `drafter_factory` cannot be checked. A user's class can be checked only if the application runs on
    this machine (`here`).
    """
    return config.drafter_factory is None and (here or not choice.is_class)


def is_here(address: str | None) -> bool:
    """Returns whether the application will run on this machine only, so that its resources can be checked here."""
    return address is None and not _joins_cluster()


def _joins_cluster() -> bool:
    """Returns whether Ray will join a running cluster, according to the environment variable and the file that Ray
    itself reads.
    """
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    return bool(os.environ.get("RAY_ADDRESS")) or (folder / "ray_current_cluster").exists()
