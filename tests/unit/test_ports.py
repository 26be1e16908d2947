"""Ports for services: free, different, and safe from outgoing connections until the service listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.cli import ports
from services.cli.ports import claim_port, free_ports
from shared.settings import StartupError

LOOPBACK = "127.0.0.1"


def test_they_differ_and_are_free() -> None:
    found = free_ports(LOOPBACK, 20)
    assert len(set(found)) == 20
    for port in found:
        socket.create_server((LOOPBACK, port)).close()


def test_no_outgoing_connection_gets_them() -> None:
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not limits.exists():
        pytest.skip("Linux only")
    least = int(limits.read_text().split()[0])
    assert all(port < least for port in [*free_ports(LOOPBACK, 20), claim_port(LOOPBACK, 0)])


def test_one_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    [taken, free] = free_ports(LOOPBACK, 2)
    monkeypatch.setattr(ports, "_FREE_PORTS", [taken, free])
    with socket.create_server((LOOPBACK, taken)):
        assert free_ports(LOOPBACK, 1) == [free]
        with pytest.raises(StartupError, match=f"port {taken} on {LOOPBACK} cannot be listened on: Address already"):
            claim_port(LOOPBACK, taken)
        with pytest.raises(StartupError, match="no free port"):
            free_ports(LOOPBACK, 2)
    assert claim_port(LOOPBACK, taken) == taken


def test_a_host_that_is_not_here() -> None:
    with pytest.raises(StartupError, match=r"no free port on 192\.0\.2\.1: Cannot assign"):
        free_ports("192.0.2.1", 1)
