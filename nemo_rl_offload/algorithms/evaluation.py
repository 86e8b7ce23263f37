"""`nemo-rl-offload eval`: several responses to each validation problem, scored, and pass@k or cons@k of them.

Nothing trains, so no trainer is started: the generation backend has all devices, with the weights of the model's
folder. A checkpoint is written as such a folder before (`cli`). Problems, prompts, scoring and the sampling of
validation are those of a run, so that an evaluation of the start model is a run's first validation.
"""

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import TextIO

from nemo_rl_offload.algorithms.loop import Say
from nemo_rl_offload.algorithms.rollout import Limits, Rollout, rollout
from nemo_rl_offload.algorithms.rollout_loop import rollout_section, tells
from nemo_rl_offload.algorithms.samples import records_of
from nemo_rl_offload.algorithms.waiting import start_of_ray, waiting
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.loader import resolve_model_path
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer, response_ends
from nemo_rl_offload.data.prompts import Prompt, prompt_data, prompt_sets
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.environments.interface import Score
from nemo_rl_offload.environments.pool import EnvironmentPool, make_environment
from nemo_rl_offload.errors import DataError
from nemo_rl_offload.generation.interface import Generator, GeneratorSetup
from nemo_rl_offload.generation.registry import make_generator
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.observability.progress import Progress
from nemo_rl_offload.policy.model_workers import ModelWorkers, without_offloading
from nemo_rl_offload.runs.output import write_json_atomic
from nemo_rl_offload.runs.run_directory import EVALUATION_FILE
from nemo_rl_offload.runs.run_files import Evaluation
from nemo_rl_offload.runs.samples import SampleLog


def pass_at_k(num_right: int, num_responses: int, k: int) -> float:
    """Chance that one of ``k`` responses, drawn from these without putting back, is right.

    ``1 - C(n - c, k) / C(n, k)``. Source: Chen et al., "Evaluating Large Language Models Trained on Code", 2021,
    https://arxiv.org/abs/2107.03374, equation 1.
    """
    assert 0 <= num_right <= num_responses
    assert 1 <= k <= num_responses
    return 1 - math.comb(num_responses - num_right, k) / math.comb(num_responses, k)


def cons_at_k(scores: Sequence[Score], k: int) -> float:
    """Chance that the most frequent answer of ``k`` responses, drawn from these without putting back, is right.

    Of several as frequent ones, the answer that comes first counts; to have none is an answer. An answer is as right as
    the first response that has it. All choices are looked at, as in NeMo-RL's `eval_cons_k`.
    """
    assert 1 <= k <= len(scores)
    is_right: dict[str | None, bool] = {}
    for score in scores:
        is_right.setdefault(score.answer, score.is_correct)
    chosen = combinations([score.answer for score in scores], k)
    return fmean(is_right[Counter(answers).most_common(1)[0][0]] for answers in chosen)


def _standard_error(chances: Sequence[float]) -> float | None:
    return stdev(chances) / math.sqrt(len(chances)) if len(chances) > 1 else None


def evaluated(
    played: Rollout, num_responses: int, k: int, model: str, wall_seconds: float, *, votes: bool = False
) -> Evaluation:
    """The figures of ``num_responses`` to each problem, next to each other; with ``votes``, cons@k is among them."""
    groups = played.groups(num_responses)
    num_right = [sum(score.is_correct for score in group.scores) for group in groups]
    chances = [pass_at_k(count, num_responses, k) for count in num_right]
    found = played.metrics()
    figures: Evaluation = {
        "model": model,
        "num_problems": len(num_right),
        "num_tests_per_prompt": num_responses,
        "k_value": k,
        "pass_at_k": fmean(chances),
        "standard_error": _standard_error(chances),
        "accuracy": found["accuracy"],
        "reward": found["reward"],
        "mean_gen_tokens_per_sample": found["mean_gen_tokens_per_sample"],
        "unfinished_fraction": found["unfinished_fraction"],
        "scorer_errors": int(found["scorer_errors"]),
        "wall_seconds": wall_seconds,
    }
    if votes:
        voted = [cons_at_k(group.scores, k) for group in groups]
        figures["cons_at_k"], figures["cons_standard_error"] = fmean(voted), _standard_error(voted)
    return figures


def run_evaluation(
    config: MasterConfig, folder: Path, model: str, say: Say, progress_stream: TextIO | None
) -> Evaluation:
    """Evaluate the model, called `model`, as the section `eval` says; responses and figures go to `folder`.

    `say` shows one line of status to the user; progress goes to `progress_stream`, or to standard output.

    Raises:
        NemoRLOffloadError: whatever a user can mend.
    """
    policy, section, start_s = config["policy"], config["eval"], time.monotonic()
    tokenizer, end_ids = load_policy_tokenizer(policy, config["data"]["prompt_template"])
    ends = response_ends(policy, tokenizer, end_ids)
    rollouts, num_responses = rollout_section(config), section["num_tests_per_prompt"]
    with waiting(say, "Preparing problems"):
        _, validation = prompt_sets(prompt_data(config), config["env"]["reasoning_gym"], tokenizer, section["seed"])
    prompts, size = validation[: rollouts["max_val_samples"]], rollouts["val_batch_size"]
    if len(prompts) < len(validation):
        num, key = len(validation), f"{config['algorithm']}.max_val_samples"
        say(f"warning: the first {len(prompts)} of {num} problems are evaluated. For all: {key}={num}.")
    if not prompts:
        raise DataError("data.validation: there is no problem to evaluate. Give some, as data.validation.path.")
    model_path, log = resolve_model_path(policy["model_name"]).resolve(), SampleLog(folder)
    for line in log.forget_after(None):
        say(f"warning: {line}")
    environment = make_environment(config, folder)
    try:
        with ExitStack() as open_ones:
            with waiting(say, start_of_ray()):
                cluster = open_ones.enter_context(VirtualCluster(**config["cluster"]))
            say(f"Loading the model on {cluster.world_size} {cluster.device} worker(s)")
            start_workers = partial(
                ModelWorkers, model_path=model_path, seed=section["seed"], num_steps=None, keep_reference=False
            )
            generator = make_generator(
                GeneratorSetup(
                    without_offloading(policy), ends.ids, model_path, cluster, cluster.whole(), start_workers
                )
            )
            generator.prepare()
            generator.start(None)
            with Progress(-(-len(prompts) // size), enabled=True, stream=progress_stream) as progress:
                played = _play(config, generator, environment, tokenizer, ends.without_text, prompts, log, progress)
            for text in {text for texts in generator.notices() for text in texts}:
                say(f"warning: {text}")
            generator.stop()
    finally:
        environment.shutdown()
    if played.is_graded:
        say(
            "warning: some rewards are neither 0 nor 1, so pass@k and accuracy, which count every reward above 0 as "
            "right, say little; the mean reward says more. Or a reward function returns "
            '{"reward": ..., "is_correct": True or False}.'
        )
    votes, wall_seconds = section["metric"] == "cons@k", time.monotonic() - start_s
    result = evaluated(played, num_responses, section["k_value"], model, wall_seconds, votes=votes)
    write_json_atomic(folder / EVALUATION_FILE, result)
    return result


def _play(
    config: MasterConfig,
    generator: Generator,
    environment: EnvironmentPool,
    tokenizer: Tokenizer,
    ends_without_text: Collection[int],
    prompts: list[Prompt],
    log: SampleLog,
    progress: Progress,
) -> Rollout:
    """Responses to all prompts, batch by batch, each written down as it ends."""
    policy, section, rollouts = config["policy"], config["eval"], rollout_section(config)
    size, parts = rollouts["val_batch_size"], list[Rollout]()
    for number, start in enumerate(range(0, len(prompts), size), start=1):
        played = rollout(
            generator,
            environment,
            tokenizer,
            prompts[start : start + size],
            section["num_tests_per_prompt"],
            section["seed"] * 1_000_003 + 2 * start + 1,
            sampling=Sampling.of(policy, validation=True),
            ends_without_text=ends_without_text,
            template=config["data"]["prompt_template"],
            limits=Limits(rollouts["max_rollout_turns"], policy["max_total_sequence_length"]),
            told=tells(progress),
        )
        parts.append(played)
        progress.update(number, accuracy=Rollout.join(parts).metrics()["accuracy"])
        records = records_of(played, range(len(played.responses)), number, "evaluation", tokenizer)
        for line in [*log.append(records), *environment.notices()]:
            progress.note(f"warning: {line}")
    return Rollout.join(parts)
