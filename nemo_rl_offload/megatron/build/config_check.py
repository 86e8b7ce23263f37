"""Megatron-Core's own word on a configuration: its objects are built, without weights, process groups or a GPU.

The rules of `config/` say beforehand, and in this project's words, what Megatron would refuse; tests hold them to it on
tiny models. This check asks Megatron itself about the very model that the configuration names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from nemo_rl_offload.config.rules.rule import read_model_config
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.config.validation import Findings, problem_at
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.bridge import bridge, have_transformer_engine
from nemo_rl_offload.megatron.build.hf_model import config_of, make_provider
from nemo_rl_offload.megatron.runtime.quiet import quiet
from nemo_rl_offload.specs.model_families import needs_torch_layers, refusals
from nemo_rl_offload.specs.model_keys import overrides_of_run, with_overrides

if TYPE_CHECKING:
    from megatron.bridge.models.gpt_provider import GPTModelProvider


class _NoOptimizer:
    """Stands in for an optimizer, of which the schedule reads the groups of parameters alone."""

    param_groups: list[dict[str, object]] = []


def ask_megatron(found: Findings) -> Findings:
    """Return the findings with what Megatron-Core refuses among the problems; nothing is asked where there are some.

    What cannot be asked here, without the model's `config.json` or Transformer Engine, becomes a warning.
    """
    config = found.config
    if config is None:
        return found
    refusals: list[str] = []
    untold: list[str] = []
    policy = config["policy"]
    num_mtp_layers = policy["megatron_cfg"]["mtp_num_layers"]
    try:
        named = read_model_config(policy["model_name"])
        model = with_overrides(named, overrides_of_run(named, policy["hf_config_overrides"], num_mtp_layers))
    except ConfigError:
        model = None
        untold.append("policy.model_name: Megatron-Core was not asked about the model, without its config.json.")
    with quiet():
        for line in _refusals(policy, model):
            (untold if _needs_transformer_engine(line) else refusals).append(line)
    problems = [problem_at(line, found.loaded) for line in refusals]
    warnings = [*found.warnings, *(problem_at(f"{line} Only a run needs it.", found.loaded) for line in untold)]
    return Findings(None if problems else config, problems, warnings, found.loaded, found.without_effect)


def _needs_transformer_engine(line: str) -> bool:
    words = re.search(r"\bTE\b|Transformer ?Engine", line.partition(": ")[2])
    return words is not None and not have_transformer_engine()


def _refusals(policy: PolicyConfig, model: Mapping[str, object] | None) -> Iterator[str]:
    from nemo_rl_offload.megatron.build import optimizer

    builders: list[Callable[[], object]] = [
        lambda: optimizer.optimizer_config(policy),
        lambda: optimizer.ddp_config(policy),
        lambda: optimizer.learning_rate_scheduler(policy, _NoOptimizer(), num_steps=1),
    ]
    if model is not None:
        builders.insert(0, lambda: _build_provider(policy, model))
    for build in builders:
        try:
            build()
        except ConfigError as error:
            yield str(error)


def _build_provider(policy: PolicyConfig, model: Mapping[str, object]) -> None:
    from nemo_rl_offload.megatron.build import transformer_config as setup

    provider = provider_for(model)
    needs_torch = needs_torch_layers(model) is not None
    impl = setup.wanted_impl(policy, needs_torch=needs_torch)
    if needs_torch and impl == "torch":
        policy = setup.without_fusions(policy)
    if not have_transformer_engine():  # fusions that the provider, not the user, asks for
        for name in set(setup.NOT_IN_TORCH) - {key for key, value in policy["megatron_cfg"].items() if value is True}:
            setattr(provider, name, False)
    setup.apply_policy(provider, policy, setup.resolve_transformer_impl("auto") if impl == "auto" else impl)


def provider_for(model: Mapping[str, object]) -> GPTModelProvider:
    """Return Megatron-Bridge's provider for the contents of a model's `config.json`.

    Raises ConfigError when transformers or Bridge does not know the family or cannot take a value.
    """
    from huggingface_hub.errors import StrictDataclassError

    if problems := refusals(model):
        raise ConfigError("\n".join(f"policy.model_name: {problem}" for problem in problems))
    family = str(model["model_type"])
    try:
        hf_config = config_of(model)
        return make_provider(bridge().AutoBridge.from_hf_config(hf_config), model, "config.json")
    except ConfigError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ConfigError(f"policy.model_name: Megatron-Bridge cannot take this {family}: {reason}") from error
