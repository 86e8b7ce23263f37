"""A worker finds out what is broken before anything imports Megatron."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.megatron.runtime import affinity, cpu, optional_packages
from nemo_rl_offload.policy.worker import PolicyWorker


class ReachedError(Exception):
    """Megatron would be imported now."""


def test_broken_packages_are_left_out_and_told_of_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def reach() -> None:
        raise ReachedError

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    monkeypatch.setattr("nemo_rl_offload.policy.worker.Notices", note("listen"))
    monkeypatch.setattr(affinity, "bind", note("bind"))
    for name in ("leave_out_broken_packages", "warn_of_broken_packages"):
        monkeypatch.setattr(optional_packages, name, note(name))
    monkeypatch.setattr(cpu, "install_cpu_support", reach)
    policy: Any = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml")["policy"]
    with pytest.raises(ReachedError):
        PolicyWorker(policy, Path("nowhere"), seed=1, num_steps=1, keep_reference=False)
    assert calls == ["listen", "bind", "leave_out_broken_packages", "warn_of_broken_packages"]
