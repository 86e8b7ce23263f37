"""Where collectives are told to listen."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from nemo_rl_offload.cluster.listening import bind_collectives
from nemo_rl_offload.errors import ConfigError

INTERFACES = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "eth0": [(socket.AF_INET6, "fe80::1%eth0"), (socket.AF_INET, "192.0.2.2"), (socket.AF_INET6, "fd00::2")],
    "ib0": [(socket.AF_INET6, "fe80::2%ib0"), (socket.AF_INET6, "fd01::2")],
    "down": [(socket.AF_PACKET, "00:00:00:00:00:00"), (socket.AF_INET6, "fe80::3%down")],
}


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        name: [SimpleNamespace(family=family, address=address) for family, address in addresses]
        for name, addresses in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("bind", "node", "address", "gloo", "nccl"),
    [
        ("auto", "127.0.0.1", "127.0.0.1", "lo", "lo"),
        ("auto", "::1", "::1", "lo", "lo"),
        ("auto", "192.0.2.2", "192.0.2.2", "eth0", None),
        ("auto", "203.0.113.9", "203.0.113.9", None, None),  # behind a translation of addresses
        ("eth0", "127.0.0.1", "192.0.2.2", "eth0", "eth0"),
        ("ib0", "192.0.2.2", "fd01::2", "ib0", "ib0"),
        ("lo", "192.0.2.2", "127.0.0.1", "lo", "lo"),
    ],
)
def test_interfaces(bind: str, node: str, address: str, gloo: str | None, nccl: str | None) -> None:
    assert bind_collectives(bind, node) == address
    assert os.environ.get("GLOO_SOCKET_IFNAME") == gloo
    assert os.environ.get("NCCL_SOCKET_IFNAME") == nccl


@pytest.mark.parametrize(("bind", "expected"), [("auto", "mine"), ("eth0", "eth0")])
def test_the_environment_wins_over_auto_alone(bind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    bind_collectives(bind, "127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == expected


@pytest.mark.parametrize(
    ("bind", "message"),
    [("eht0", r"has no interface 'eht0', only down, eth0, ib0, lo\. Did you mean 'eth0'\?"), ("down", "no address")],
)
def test_interfaces_that_are_of_no_use(bind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind_collectives(bind, "127.0.0.1")
