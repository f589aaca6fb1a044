"""The trainer's side of weight updates: makes the HTTP calls of an update and broadcasts tensors to the engines."""

import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from wingbeat.deployments.cli.server_calls import call_server
from wingbeat.runtime.rollouts.broadcasts import PATIENCE_S, Broadcasts

if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 1 << 28
"""Bytes of tensors that are announced together. An engine needs this much free memory to receive them."""
CALL_S = 600.0
REFUSAL_S = 0.05
"""Seconds between an announcement and its broadcast, in which the server can refuse the announcement. A broadcast to
engines that do not receive would block.
"""


class WeightSender:
    """Connection of a trainer to one server.

    Args:
        url: URL of the server.
        operator_key: key for the server's operator paths; None if the server has no operator key.
        backend: gloo or nccl, as in the server's `weight_transfer_config`.
        address: address of this machine at which engines can reach it.
        model: name of the model to update; needed if the server has several models.

    Raises:
        UserError: the server refuses, or does not answer.
        WeightsRefused: the engines cannot be reached.
    """

    def __init__(
        self,
        url: str,
        operator_key: str | None = None,
        backend: str = "gloo",
        address: str = "127.0.0.1",
        model: str | None = None,
    ) -> None:
        self._url, self._key = url, operator_key
        self._named: dict[str, Any] = {} if model is None else {"model": model}
        self._beside = ThreadPoolExecutor(1)
        path = "/get_world_size?" + urlencode(self._named)
        world_size = 1 + call_server(url, operator_key, "GET", path)["world_size"]
        port = _free_port(address)
        info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        ready = self._begin("init_weight_transfer_engine", init_info=info)
        self._group = Broadcasts(backend, address, port, 0, world_size)
        ready.result(PATIENCE_S)

    def send(
        self, tensors: "Iterable[tuple[str, Tensor]]", version: str | None = None, head: bool = False
    ) -> dict[str, Any]:
        """Update the server's weights; returns the server's answer.

        Args:
            tensors: pairs of parameter name and tensor, for all parameters or only for the changed parameters.
            version: name of the new weights.
            head: whether the tensors belong to the draft head.

        Raises:
            UserError: the server refuses the tensors; its answer gives the reason.
            ConnectionError: an engine is gone.
        """
        self.call("start_draft_weight_update" if head else "start_weight_update")
        for piece in _pieces(tensors):
            announced = {
                "names": [name for name, _ in piece],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in piece],
                "shapes": [list(tensor.shape) for _, tensor in piece],
            }
            written = self._begin("update_weights", update_info=announced)
            wait([written], REFUSAL_S)
            for _, tensor in piece:
                if written.done():
                    written.result(0)  # raises an error if the engines do not receive the tensors
                self._group.send(tensor.detach())
            written.result(CALL_S)
        return self.call("finish_weight_update", **({} if version is None else {"weight_version": version}))

    def call(self, name: str, **fields: Any) -> dict[str, Any]:
        """Send `fields` by POST to the path `/name` and return the server's answer. Raises UserError if the server
        refuses.
        """
        return call_server(self._url, self._key, "POST", f"/{name}", self._named | fields, CALL_S)

    def _begin(self, name: str, **fields: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        return self._beside.submit(self.call, name, **fields)


def _pieces(tensors: "Iterable[tuple[str, Tensor]]") -> "Iterator[list[tuple[str, Tensor]]]":
    piece, size = [], 0
    for name, tensor in tensors:
        if piece and size + tensor.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append((name, tensor))
        size += tensor.nbytes
    if piece:
        yield piece


def _free_port(address: str) -> int:
    with socket.socket() as found:
        found.bind((address, 0))
        return found.getsockname()[1]
