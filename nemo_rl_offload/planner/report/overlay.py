"""A plan as a YAML file that inherits a configuration."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from nemo_rl_offload.planner.plan import JobPlan
from nemo_rl_offload.planner.report.tables import summary_lines


def plan_overlay(
    plan: JobPlan,
    config: Path,
    overlay: Path,
    overrides: Sequence[str] = (),
    changed: Mapping[str, object] | None = None,
) -> str:
    """A configuration that inherits `config`, has what the `overrides` of the plan `changed`, and adds the plan's keys;
    `overlay` is where it will stand."""
    content = _merged(changed or {}, {"policy": {"megatron_cfg": plan.keys}})
    return overlay_text(summary_lines(plan), content, config, overlay, overrides)


def overlay_text(
    said: Sequence[str], content: Mapping[str, object], config: Path, overlay: Path, overrides: Sequence[str]
) -> str:
    """A configuration with this content that inherits `config`; above it what is said, as comments."""
    inherited = os.path.relpath(config, overlay.parent) if config.exists() else str(config)  # that is a shipped one
    comments = "\n".join(f"# {line}" for line in said)
    given = f"# planned with: {' '.join(overrides)}\n" if overrides else ""
    written = yaml.safe_dump({"defaults": inherited, **content}, sort_keys=False)
    return f"# Written by `nemo-rl-offload plan`.\n{comments}\n{given}{written}"


def _merged(content: Mapping[str, object], added: Mapping[str, object]) -> dict[str, object]:
    """Sections that both have are joined."""
    both = {
        key: _merged(before, value)
        for key, value in added.items()
        if isinstance(value, Mapping) and isinstance(before := content.get(key), Mapping)
    }
    return {**content, **added, **both}
