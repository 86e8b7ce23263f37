"""Workers that cannot meet say so."""

import socket

import pytest
from torch.distributed.distributed_c10d import GroupMember

from nemo_rl_offload.errors import WorkerError
from nemo_rl_offload.megatron import model


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(model.dist, "is_initialized", lambda: False)
    before, GroupMember.WORLD = GroupMember.WORLD, None  # what other tests of this process have joined
    request.addfinalizer(lambda: setattr(GroupMember, "WORLD", before))
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        address = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in address.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            WorkerError, match=rf"cannot meet at 127\.0\.0\.1:{port}: .*EADDRINUSE.*start the run again"
        ):
            model._join("gloo")
