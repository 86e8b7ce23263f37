"""Where the processes of a run listen, and that nobody listens who need not.

Ray binds to loopback where the address of its node is 127.0.0.1, and to every interface otherwise. On Linux only one
switch gives the node that address (`private_ray`): `_node_ip_address="127.0.0.1"` is turned into the machine's. What
the workers themselves open, torch's rendezvous store and the collectives, is bound here.

| who | a Ray of this run | a Ray that was joined |
|---|---|---|
| Ray: gcs_server, raylet, agents, workers, driver | 127.0.0.1, with a token | as that Ray was started |
| the rendezvous store of rank 0 | 127.0.0.1 | the node's address |
| gloo | 127.0.0.1 | the node's address |
| NCCL | 127.0.0.1 | NCCL chooses |

`cluster.bind` names an interface for the last three. Nothing of these three asks for a password: who reaches the
address can disturb or mislead a run. `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` of the environment win over `auto`.
"""

import ipaddress
import os
import socket

import psutil

from nemo_rl_offload.errors import ConfigError, nearest

AUTO = "auto"
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def bind_collectives(bind: str, node_address: str) -> str:
    """Have gloo and NCCL of this process listen where `cluster.bind` says; returns the address of it here.

    Args:
        bind: an interface of this machine, or "auto".
        node_address: what Ray calls this machine.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    if bind != AUTO:
        address = address_of(bind)
        os.environ[GLOO_INTERFACE] = os.environ[NCCL_INTERFACE] = bind
        return address
    if interface := interface_of(node_address):
        os.environ.setdefault(GLOO_INTERFACE, interface)
        if ipaddress.ip_address(node_address).is_loopback:
            os.environ.setdefault(NCCL_INTERFACE, interface)
    return node_address


def address_of(interface: str) -> str:
    """The first address of an interface of this machine, IPv4 before IPv6.

    Raises:
        ConfigError: there is no such interface, or it has no address.
    """
    found = psutil.net_if_addrs()
    if interface not in found:
        raise ConfigError(
            f"cluster.bind: {socket.gethostname()} has no interface '{interface}', only {', '.join(sorted(found))}."
            f"{nearest(interface, found)} Every node needs it; 'auto' takes the address that Ray has of each."
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in found[interface]:
            if each.family == family and "%" not in each.address:  # IPv6 of the link alone
                return each.address
    raise ConfigError(f"cluster.bind: the interface '{interface}' of {socket.gethostname()} has no address.")


def interface_of(address: str) -> str | None:
    """The interface of this machine that has the address; None: none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
