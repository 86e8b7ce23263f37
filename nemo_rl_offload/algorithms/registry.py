"""Algorithms by the name that the command line and the key `algorithm` give them."""

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from nemo_rl_offload.algorithms.distillation import run_distillation
from nemo_rl_offload.algorithms.dpo import run_dpo
from nemo_rl_offload.algorithms.grpo import run_grpo
from nemo_rl_offload.algorithms.loop import Say
from nemo_rl_offload.algorithms.sft import run_sft
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.runs.run_files import Summary

RUNNERS: dict[str, Callable[[MasterConfig, Path, Say, TextIO | None], Summary]] = {
    "grpo": run_grpo,
    "sft": run_sft,
    "dpo": run_dpo,
    "distillation": run_distillation,
}
