"""On-policy distillation (https://arxiv.org/abs/2306.13649).

Each step lets the student answer a few prompts, asks the teacher for its most likely tokens at every position of the
answers, and takes a step on the divergence of the student from the teacher there. The teacher is a second policy with
its own workers on the same slots, since it may have another architecture; swapping weights inside one set of workers
would take only a twin. On GPUs its weights wait in host memory while the student generates and trains.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from nemo_rl_offload.algorithms.loop import Say, Stopwatch, run_loop
from nemo_rl_offload.algorithms.rollout_loop import (
    RolloutLoop,
    groups_per_slot,
    num_optimizer_steps,
    training_and_generation_slots,
)
from nemo_rl_offload.algorithms.waiting import waiting
from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.loader import resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.schema import MasterConfig, PolicyConfig
from nemo_rl_offload.data.policy_tokenizer import check_vocabulary, load_policy_tokenizer, response_ends
from nemo_rl_offload.data.prompts import Prompt, TrainingPrompts, prompt_data, prompt_sets
from nemo_rl_offload.data.tokenizer import Tokenizer, load_tokenizer
from nemo_rl_offload.environments.pool import EnvironmentPool, make_environment
from nemo_rl_offload.errors import ConfigError, DataError
from nemo_rl_offload.policy.driver import Policy
from nemo_rl_offload.policy.interface import PolicyInterface
from nemo_rl_offload.policy.model_workers import without_offloading
from nemo_rl_offload.runs.run_files import Summary
from nemo_rl_offload.specs.pipeline_layout import VIRTUAL


class Distillation(RolloutLoop):
    """The training loop over student, teacher and environment that exist already."""

    def __init__(
        self,
        config: MasterConfig,
        policy: PolicyInterface,
        teacher: PolicyInterface,
        environment: EnvironmentPool,
        tokenizer: Tokenizer,
        ends_without_text: Collection[int],
        prompts: tuple[TrainingPrompts, list[Prompt]],
        run_dir: Path,
    ) -> None:
        super().__init__(config, policy, environment, tokenizer, ends_without_text, prompts, run_dir)
        self._teacher = teacher

    def update(self, watch: Stopwatch) -> tuple[dict[str, float], int]:
        """The student's responses, the teacher's logits, updates."""
        section = self.config["distillation"]
        prompts = self._train_prompts.next_batch(section["num_prompts_per_step"])
        num_generations = section["num_generations_per_prompt"]
        played = watch.time("generation", lambda: self._rollout(prompts, num_generations, 2 * self.step))
        self._take_training(played)
        batch = played.batch(self._tokenizer.pad_token_id)
        num_tokens = len(self._tokenizer)
        k = min(section["topk_logits_k"], num_tokens)
        batch["teacher_topk_logits"], batch["teacher_topk_indices"] = watch.time(
            "teacher_logits", lambda: self._ask_teacher(batch, k, num_tokens)
        )
        updates = watch.time("train", lambda: self.policy.train(batch, *self.loss))
        return updates | played.metrics(), int(batch["input_lengths"].sum())

    def _ask_teacher(self, batch: Batch, k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Its weights come to the device for this, where torch keeps what the student's steps have used."""
        self.policy.hand_back_memory()
        return self._teacher.get_topk_logits(batch, k, num_tokens)

    def notices(self) -> list[str]:
        """What the workers of both models have warned of since the last call, each text once."""
        return list(dict.fromkeys([*super().notices(), *self._teacher.notices()]))

    def close(self) -> None:
        """End the workers of both models, and the environment."""
        super().close()
        self._teacher.shutdown()


OF_THE_STUDENTS_LAYERS = (
    "pipeline_model_parallel_layout",
    *(f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")),
)
"""Keys of `policy.megatron_cfg` that say nothing about a teacher."""


def teacher_config(config: MasterConfig) -> PolicyConfig:
    """The teacher's policy section: the student's with the section `teacher` over it, and nothing offloaded.

    Its layers are divided evenly among the student's pipeline ranks, without virtual stages, which shorten a step of
    training alone. It generates nothing, so that no engine starts for it.
    """
    student, teacher = config["policy"], config["teacher"]
    assert teacher["model_name"] is not None, "checked with the configuration"
    merged: Any = {**without_offloading(student), **{key: value for key, value in teacher.items() if value is not None}}
    merged |= {"hf_config_overrides": {}, "quant_cfg": None}  # of the student alone
    megatron = {**merged["megatron_cfg"], **dict.fromkeys(OF_THE_STUDENTS_LAYERS)}
    megatron["mtp_num_layers"] = 0 if student["megatron_cfg"]["mtp_num_layers"] == 0 else None
    megatron["mtp_use_repeated_layer"] = False
    if megatron[VIRTUAL] is not None:
        megatron |= {VIRTUAL: None, "overlap_p2p_comm": False, "batch_p2p_comm": True}
    merged["megatron_cfg"] = megatron
    return {**merged, "generation": {**merged["generation"], "backend": "megatron"}}  # type: ignore[typeddict-item]


@contextmanager
def _of_the_teacher() -> Iterator[None]:
    """Faults of the teacher's folder, which a policy's are told as, name its own key."""
    try:
        yield
    except (ConfigError, DataError) as error:
        told = re.sub(r"^policy\.(model_name|tokenizer\.name):", "teacher.model_name:", str(error), flags=re.MULTILINE)
        raise type(error)(told) from error


def run_distillation(config: MasterConfig, run_dir: Path, say: Say, progress_stream: TextIO | None) -> Summary:
    """Distill as `config` says; arguments, result and errors as in `run_loop`."""
    section, policy_config, teacher_policy = config["distillation"], config["policy"], teacher_config(config)
    tokenizer, end_ids = load_policy_tokenizer(policy_config, config["data"]["prompt_template"])
    ends = response_ends(policy_config, tokenizer, end_ids)
    teacher_path = resolve_model_path(teacher_policy["model_name"])
    with _of_the_teacher():
        teacher_tokenizer = load_tokenizer(teacher_path)
    if teacher_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"teacher.model_name: the tokenizer in {teacher_path} has another vocabulary than the student's. "
            "Choose a teacher of the same family."
        )
    check_vocabulary(tokenizer, resolve_tokenizer_path(policy_config["tokenizer"]["name"]), teacher_path)
    with waiting(say, "Preparing problems"):
        prompts = prompt_sets(prompt_data(config), config["env"]["reasoning_gym"], tokenizer, section["seed"])
        prompts[0].check()

    def build(cluster: VirtualCluster) -> Distillation:
        environment = make_environment(config, run_dir)
        shared: dict[str, Any] = {"seed": section["seed"], "keep_reference": False}
        slots, generation_slots = training_and_generation_slots(cluster, policy_config)
        with _of_the_teacher():
            teacher = Policy(slots, teacher_policy, teacher_path, ends.ids, num_steps=None, **shared)
        teacher.leave_device()
        student_path = resolve_model_path(policy_config["model_name"])
        num_steps = num_optimizer_steps(config, prompts[0])
        policy = Policy(
            slots,
            policy_config | {"offload_optimizer_for_logprob": False},  # which a student does not compute
            student_path,
            ends.ids,
            num_steps=num_steps,
            generation_slots=generation_slots,
            **shared,
        )
        return Distillation(config, policy, teacher, environment, tokenizer, ends.without_text, prompts, run_dir)

    return run_loop(config, run_dir, say, progress_stream, build, 1 + groups_per_slot(policy_config))
