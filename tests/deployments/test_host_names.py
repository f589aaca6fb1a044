"""Hosts as they stand in URLs."""

import pytest

from wingbeat.deployments.host_names import url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost:8000"),
        ("::1", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:8000"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:8000"),
        ("::", "http://[::]:8000"),
    ],
)
def test_an_address_of_ipv6_stands_in_brackets(host, url):
    assert url_of(host, 8000) == url
