"""The address to listen at: refused where another server is in the way, free where nobody listens any more."""

import errno
import socket

import pytest

from wingbeat.deployments.start_checks import preflight


@pytest.mark.parametrize("option", ["SO_REUSEADDR", "SO_REUSEPORT"])
@pytest.mark.parametrize(
    ("listens", "asked"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")]
)
def test_a_port_that_another_server_listens_at_is_refused(option: str, listens: str, asked: str) -> None:
    """With SO_REUSEPORT, as Serve's proxy has it, a second server could bind and would get half of the requests."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        server.bind((listens, 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} on {asked} is in use"):
            preflight.check_address(asked, port)
    preflight.check_address(asked, port)


def test_a_port_whose_last_connection_waits_out_its_time_is_free() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Serve's proxy does
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = server.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as without, pytest.raises(OSError, match="in use"):
        without.bind(address)
    preflight.check_address(*address)


@pytest.mark.parametrize(
    ("host", "says"), [("192.0.2.1", "not an address of this machine"), ("no-such-host.invalid", "cannot be resolved")]
)
def test_a_host_that_is_not_this_machine_is_refused(host: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        preflight.check_address(host, 8000)


def test_a_port_of_the_system_is_refused_where_it_may_not_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(preflight.socket, "socket", type("Bound", (socket.socket,), {"bind": refuse}))
    with pytest.raises(ValueError, match=r"port 80 on 127\.0\.0\.1 may not be used by this user"):
        preflight.check_address("127.0.0.1", 80)
