"""Which checkpoint a command means, and whether a new run can begin with it: `run --from-checkpoint`."""

from collections.abc import Mapping
from pathlib import Path

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.rules.rule import read_shape
from nemo_rl_offload.errors import CheckpointError, ConfigError
from nemo_rl_offload.runs.comparison import differences, leaves, may_change
from nemo_rl_offload.runs.origin import Origin, origin_of, read_origin
from nemo_rl_offload.runs.plain_files import why_no_folder
from nemo_rl_offload.runs.run_directory import (
    CHECKPOINTS,
    CONFIG_FILE,
    loop_state,
    read_checkpoint,
    read_state,
    steps_in,
)
from nemo_rl_offload.specs.documents import DocumentError, read_yaml

_ORDER = ("algorithm", "data.train", "data.shuffle", "env.reasoning_gym.task", "env.reasoning_gym.params")
"""Keys that decide which problem stands at which place."""
_ORDER_OF_RECORDS = (
    *("data.validation", "data.on_bad_line", "data.add_bos", "data.add_eos", "data.prompt_template"),
    *("policy.train_global_batch_size", "policy.max_total_sequence_length", "policy.tokenizer"),
)
"""The same of given answers, where records are left out, and places counted in batches."""
_OPTIMIZER = "policy.megatron_cfg.optimizer"
_PEFT = "policy.megatron_cfg.peft"
_OF_ADAPTERS = (
    "policy.model_name",
    *(f"{_PEFT}.{key}" for key in ("dim", "alpha", "target_modules", "exclude_modules")),
)
"""Keys that say which adapters there are, of which model, and how much they count."""
_QUANT_CFG = "policy.quant_cfg"
"""A checkpoint's weights are quantized by it, beside the optimizer's state, until the next step."""
_MTP_LAYERS = "policy.megatron_cfg.mtp_num_layers"
_OF_THE_STATE = tuple(
    f"{_OPTIMIZER}.{key}" for key in ("optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum")
)
"""Keys whose values come with an optimizer's state."""


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """The run directory and the checkpoint's folder that `RUN_DIR/step_N` or `RUN_DIR/checkpoints/step_N` names.

    Raises:
        CheckpointError: there is none, and the message lists those that there are; or it is reached by a link below
            the run directory.
    """
    run_dir = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
    folder = run_dir / CHECKPOINTS / path.name
    if folder.is_dir() and path.name.startswith("step_"):
        for place in (run_dir / CHECKPOINTS, folder):
            if what := why_no_folder(place):
                raise CheckpointError(f"{place} cannot be used: {what}. Name the run directory that it leads to.")
        return run_dir, folder
    if own := steps_in(path / CHECKPOINTS):
        raise CheckpointError(
            f"{path}: is a run, with {checkpoints_of(path)}. Give one of them, such as {path}/step_{own[-1]}."
        )
    there = checkpoints_of(run_dir)
    raise CheckpointError(
        f"{path}: there is no such checkpoint. "
        + (
            f"{run_dir} has: {there}; checkpointing.keep_top_k says how many stay."
            if there
            else "Give RUN_DIR/step_N of a run that has written checkpoints."
        )
    )


def checkpoints_of(run_dir: Path) -> str:
    """The checkpoints of a run as a line, empty without any; of those without the optimizer's state it is told."""

    def told(step: int) -> str:
        folder = run_dir / CHECKPOINTS / f"step_{step}"
        try:
            is_whole = read_state(folder).get("has_optimizer", True)
        except CheckpointError:  # which is told where it is used
            is_whole = True
        return folder.name if is_whole else f"{folder.name} (without the optimizer's state)"

    return ", ".join(map(told, steps_in(run_dir / CHECKPOINTS)))


def began_from(run_dir: Path, checkpoint: Path, *, weights_only: bool) -> Origin | None:
    """The origin of a run that goes on from checkpoints of its own, where it is the one that is named.

    The checkpoint that it began with need not be there any more. None: a run begins, or another one is named.
    """
    try:
        origin = read_origin(run_dir)
    except ConfigError:  # which is told where the folder is opened
        return None
    if origin is None or origin["takes"] != ("weights" if weights_only else "everything"):
        return None
    path = checkpoint.resolve()
    is_named = origin["checkpoint"] in (str(path), str(path.parent / CHECKPOINTS / path.name))
    return origin if is_named and steps_in(run_dir / CHECKPOINTS) else None


def begin_from(checkpoint: Path, config: Mapping[str, object], *, weights_only: bool) -> Origin:
    """Where a new run of this configuration begins that takes over a checkpoint, or its weights alone.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: the configuration cannot go on from there; the message names the keys.
    """
    run_dir, folder = find_checkpoint(checkpoint)
    found = read_checkpoint(folder)
    alternative = "or take its weights alone: --weights-only"
    try:
        saved = read_yaml(run_dir / CONFIG_FILE, follows_links=False)
        _check_adapters(checkpoint, saved, config, weights_only=weights_only)
        _check_further_tokens(checkpoint, saved, config, weights_only=weights_only)
    except (OSError, DocumentError) as error:
        if weights_only:
            return origin_of(folder, "weights")
        raise ConfigError(
            f"--from-checkpoint {checkpoint}: {run_dir / CONFIG_FILE} cannot be read, so that it is not known of which "
            f"data its place is. Restore it, {alternative}."
        ) from error
    if weights_only:
        return origin_of(folder, "weights")
    loop_state(found)
    if saved.get("algorithm") != config["algorithm"]:
        raise ConfigError(
            f"--from-checkpoint {checkpoint}: its place in the data is of {saved.get('algorithm')}, and this is "
            f"{config['algorithm']} (algorithm is {saved.get('algorithm')!r} there). Give the same, {alternative}."
        )
    there, here = (_that_must_be_the_same(each) for each in (saved, config))
    if changed := differences(there, here).told:
        raise ConfigError(
            f"--from-checkpoint {checkpoint}: its place in the data, or its optimizer's state, is of another "
            f"configuration ({changed}). Give the same, {alternative}."
        )
    num_steps, step = f"{config['algorithm']}.max_num_steps", found.state["step"]
    most = leaves(config)[num_steps]
    if isinstance(most, int) and most <= step:
        raise ConfigError(
            f"{num_steps}: {most} steps are taken already at {checkpoint}. Give more than {step}, {alternative}."
        )
    return origin_of(folder, "everything")


def changed_from(checkpoint: Path, config: Mapping[str, object]) -> list[str]:
    """A line for each key by which a run from a checkpoint learns otherwise than that run did."""
    run_dir, _ = find_checkpoint(checkpoint)
    there, here = (leaves(each) for each in (read_yaml(run_dir / CONFIG_FILE, follows_links=False), config))
    algorithm = config.get("algorithm")
    kept = [
        {path: value for path, value in values.items() if not may_change(path, algorithm, by_request=False)}
        for values in (there, here)
    ]
    return [f"{path} is {new} instead of {old} of that run." for path, (old, new) in differences(*kept).items()]


def _check_adapters(
    checkpoint: Path, saved: Mapping[str, object], config: Mapping[str, object], *, weights_only: bool
) -> None:
    """Raise ConfigError where adapters and whole weights, or other adapters, meet: a checkpoint has adapters alone."""
    there, here = (leaves(each) for each in (saved, config))
    has_there, has_here = (bool(each.get(f"{_PEFT}.enabled", False)) for each in (there, here))
    path = f"--from-checkpoint {checkpoint}"
    merged = "Export it (`nemo-rl-offload export` merges adapters), and set policy.model_name to the folder."
    if has_there != has_here:
        with_adapters, without = ("has", "this run trains whole weights") if has_there else ("has not", "this run has")
        raise ConfigError(f"{path}: its run {with_adapters} adapters ({_PEFT}.enabled), and {without}. {merged}")
    if not has_here:
        return
    other = {key: there.get(key) for key in _OF_ADAPTERS if there.get(key) != here.get(key)}
    if other:
        told = "; ".join(f"{key} is {value!r} there" for key, value in other.items())
        raise ConfigError(f"{path}: it has adapters of other settings ({told}). Give the same. Or: {merged}")
    algorithm = str(config.get("algorithm"))
    if weights_only and algorithm in ALGORITHMS and ALGORITHMS[algorithm].keeps_reference(config):
        raise ConfigError(
            f"{path}: with adapters the reference is the model without them, and not what --weights-only begins with. "
            f"{merged}"
        )


def _check_further_tokens(
    checkpoint: Path, saved: Mapping[str, object], config: Mapping[str, object], *, weights_only: bool
) -> None:
    """Raise ConfigError where a checkpoint lacks layers that the run trains, or has an optimizer's state of more."""
    are_left_out, leaves_out = (leaves(each).get(_MTP_LAYERS) == 0 for each in (saved, config))
    if are_left_out == leaves_out or (leaves_out and weights_only):
        return
    try:
        shape = read_shape(str(leaves(config).get("policy.model_name")))
    except ConfigError:  # which a rule reports
        return
    if shape.predicts_further_tokens and are_left_out:
        raise ConfigError(
            f"--from-checkpoint {checkpoint}: it lacks the model's layers that predict further tokens ({_MTP_LAYERS} "
            "is 0 there). Set that to 0 here too."
        )
    if shape.predicts_further_tokens:
        raise ConfigError(
            f"--from-checkpoint {checkpoint}: its optimizer's state is of a model with layers that predict further "
            f"tokens, which {_MTP_LAYERS} 0 leaves out. Set that to null, or take its weights alone: --weights-only."
        )


def _that_must_be_the_same(config: Mapping[str, object]) -> dict[str, object]:
    algorithm = str(config.get("algorithm"))
    paths = (*_ORDER, f"{algorithm}.seed", *_OF_THE_STATE, _QUANT_CFG)
    if algorithm in ALGORITHMS and not ALGORITHMS[algorithm].generates:
        paths += _ORDER_OF_RECORDS
    return {
        path: value
        for path, value in leaves(config).items()
        if any(f"{path}.".startswith(f"{each}.") for each in paths)
    }
