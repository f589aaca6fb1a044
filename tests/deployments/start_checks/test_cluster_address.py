"""Refusals of `wingbeat serve --address` before any call to Ray."""

import socket

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.start_checks import preflight

TOO_LONG = AppConfig(max_model_len=1_000_000)
"""Refused as soon as the model is looked at."""


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://head:10001", "Ray's client cannot serve"),
        ("head", "must be HOST:PORT of the cluster's head, or auto"),
        ("head:gcs", "must be HOST:PORT"),
        (":6379", "must be HOST:PORT"),
    ],
)
def test_an_address_that_is_none_of_a_cluster_is_refused(address: str, says: str):
    with pytest.raises(ValueError, match=f"^--address {address}: .*{says}"):
        preflight.check(TOO_LONG, "127.0.0.1", 1, address)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_a_port_in_use_may_be_that_of_serve_in_the_cluster_that_is_joined(address: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match="in use by another server"):
            preflight.check(TOO_LONG, "127.0.0.1", port)
        with pytest.raises(ValueError, match="max_model_len is 1000000"):
            preflight.check(TOO_LONG, "127.0.0.1", port, address)
