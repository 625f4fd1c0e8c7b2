import socket

from rheostat.infra.pools import machines


async def test_a_port_that_is_closed_or_silent_does_not_listen(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert await machines.accepts_connections("127.0.0.1", port)
    monkeypatch.setattr(machines, "PROBE_SECONDS", 0.1)
    assert not await machines.accepts_connections("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with socket.create_connection(address):  # nobody accepts: the next one gets no answer, as from a dead machine
            assert not await machines.accepts_connections(*address)
