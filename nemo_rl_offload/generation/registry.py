"""Backends by the value of `policy.generation.backend`.

A new one is a value in `specs/generation.py` and a line here. The configuration's schema refuses any other.
"""

from collections.abc import Mapping
from importlib import import_module

from nemo_rl_offload.generation.interface import Generator, GeneratorSetup
from nemo_rl_offload.specs.generation import GenerationBackend

BACKENDS: Mapping[GenerationBackend, str] = {
    "megatron": "nemo_rl_offload.generation.megatron_generator:MegatronGenerator",
    "vllm": "nemo_rl_offload.generation.vllm.generator:VllmGenerator",
}
"""Module and class, imported when one is made. A class takes a `GeneratorSetup`."""


def make_generator(setup: GeneratorSetup) -> Generator:
    """The generator that the configuration names, not started."""
    module, _, name = BACKENDS[setup.config["generation"]["backend"]].partition(":")
    generator: Generator = getattr(import_module(module), name)(setup)
    return generator
