"""The command line's grammar; `cli` executes it."""

import argparse
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from nemo_rl_offload.config.algorithms import ALGORITHMS

NUM_LAYOUTS = 5
"""That `plan --layouts` prints."""
YAML = (".yaml", ".yml")
type Commands = "argparse._SubParsersAction[argparse.ArgumentParser]"

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "run": (
        "run grpo",
        "run sft --config examples/configs/sft_chat.yaml data.train.path=chats.jsonl",
        "run grpo --config my.yaml --run-dir results/mine policy.megatron_cfg.optimizer.lr=1e-6",
        "run grpo --config my.yaml --run-dir results/b --from-checkpoint results/a/step_100 grpo.max_num_steps=200",
        "run grpo --config my.yaml --from-checkpoint results/my_sft/step_100 --weights-only",
    ),
    "check": ("check my.yaml", "check recipe.yaml --verbose cluster.gpus_per_node=8"),
    "plan": (
        "plan my.yaml --gpu h100-80gb",
        "plan my.yaml --gpu h100-80gb --memory 72GiB --write planned.yaml",
        "plan my.yaml --gpu h100-80gb --layouts 3 cluster.num_nodes=4 cluster.gpus_per_node=8",
    ),
    "eval": (
        "eval --checkpoint results/mine/step_100",
        "eval --config my.yaml eval.num_tests_per_prompt=16 eval.k_value=4",
    ),
    "doctor": ("doctor", "doctor --write-device mine.yaml"),
    "export": ("export results/mine/step_100 my-model", "export results/mine/step_100 my-model --dtype bfloat16"),
    "report": (
        "report results/mine",
        "report results/mine --serve",
        "report results/a results/b results/c",
        "report results/a results/b --format json",
    ),
    "completion": ("completion",),
    "bench": ("bench offload --layers 8 --sequence 16384", "bench stash --out results/stash"),
}
"""Of each command, shown by its --help."""
EPILOG = """\
overrides (Hydra's grammar):
  a.b=value     change a key       policy.megatron_cfg.optimizer.lr=1e-4
  +a.b=value    add a key          +env.reasoning_gym.params.max_word_len=6
  ~a.b          remove a key       ~env.reasoning_gym.params.max_word_len
"""


class _Formatter(argparse.HelpFormatter):
    """Wraps text of one line to the terminal, and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """No override, option or configuration that follows `--layouts` is taken for its number."""
        words = list(sys.argv[1:] if args is None else args)
        for place, (word, after) in enumerate(pairwise([*words, ""])):
            if word == "--layouts" and _is_no_number(after):
                words[place] = f"{word}={NUM_LAYOUTS}"
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.+)' \(choose from (.+)\)$", message):
            choices = {name: name for name in re.findall(r"[\w-]+", wrong[2])}
            others = {"train": "run"} if "run" in choices else {}
            near = get_close_matches(wrong[1], [*choices, *others], n=1, cutoff=0.7)  # dpo is no guess for ppo
            message += "." + "".join(f" Did you mean '{(choices | others)[name]}'?" for name in near)
            if Path(wrong[1]).suffix in YAML:
                message += f" A file follows --config, as in `run sft --config {wrong[1]}`."
        if message.endswith("are required: algorithm"):
            message += f", one of {', '.join(sorted(ALGORITHMS))}, as in `run sft --config my.yaml`"
        super().error(message)


def _is_no_number(word: str) -> bool:
    """Whether a word behind `--layouts` is not meant as its number, not even as a wrong one."""
    is_option = word.startswith("-") and not word[1:2].isdigit()
    return is_option or "=" in word or word.startswith("~") or Path(word).suffix in YAML or not word


def _num_layouts(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layouts: give a whole number from 1 on, or none")
    return int(text)


def _add_format(parser: argparse.ArgumentParser, what: str) -> None:
    """`--format`: to read, or for other programs."""
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        type=lambda word: "table" if word == "text" else word,  # as `check` called it
        help=f"how {what} printed (default: table)",
    )


def _examples(command: str) -> str:
    return "".join(["examples:\n", *(f"  nemo-rl-offload {example}\n" for example in EXAMPLES[command])])


def subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The commands' parsers, by their names."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found: dict[str, argparse.ArgumentParser] = commands.choices
    return found


def option_names(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """A command's long options, without their dashes."""
    names = [option for action in subparsers(parser)[command]._actions for option in action.option_strings]
    return [name.removeprefix("--") for name in names if name.startswith("--")]


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser: argparse.ArgumentParser = _Parser(
        prog="nemo-rl-offload", description="Post-train language models on Megatron-Core with activation offloading."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_run,
        _add_check,
        _add_plan,
        _add_eval,
        _add_doctor,
        _add_export,
        _add_report,
        _add_bench,
        _add_completion,
    ):
        add(commands)
    return parser


def _add_run(commands: Commands) -> None:
    run = commands.add_parser(
        "run",
        help="train a model",
        description="Train a model. Without --config, a small example that runs anywhere.",
        usage="%(prog)s ALGORITHM [options] [KEY=VALUE ...]",
        epilog=f"{_examples('run')}\n{EPILOG}",
        formatter_class=_Formatter,
    )
    run.add_argument("algorithm", choices=sorted(ALGORITHMS))
    run.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML configuration (default: the algorithm's example)"
    )
    run.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where everything goes (default: results/<config name>)"
    )
    run.add_argument(
        "--from-checkpoint",
        type=Path,
        metavar="RUN_DIR/step_N",
        help="begin a new run where another one was: with its weights, optimizer, step and place in the data",
    )
    run.add_argument(
        "--weights-only", action="store_true", help="with --from-checkpoint: take its weights, and begin at step 1"
    )
    run.add_argument(
        "--force",
        action="store_true",
        help="let a run in --run-dir give way: it is moved to a folder below, and nothing is deleted",
    )
    _add_format(run, "the summary at the end is")


def _add_check(commands: Commands) -> None:
    check = commands.add_parser(
        "check",
        help="check a configuration",
        description="Check a configuration, offline and in seconds, all problems at once; exit code 2 if there are any",
        usage="%(prog)s FILE [--verbose] [--megatron] [--format table|json] [KEY=VALUE ...]",
        epilog=f"{_examples('check')}\n{EPILOG}",
        formatter_class=_Formatter,
    )
    check.add_argument("config", type=Path, metavar="FILE", help="YAML configuration")
    _add_format(check, "the findings are")
    check.add_argument(
        "--megatron",
        action="store_true",
        help="where nothing is wrong, also build Megatron-Core's own configuration objects; takes seconds more",
    )
    check.add_argument(
        "--verbose", action="store_true", help="name each key of a NeMo-RL recipe that has no effect here, and say why"
    )


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict memory and time, and choose what to offload",
        description="Predict memory and time of a configuration on a GPU, offline, and choose what to offload for it. "
        "Exit code 2 if nothing makes it fit.",
        usage="%(prog)s FILE --gpu NAME [options] [KEY=VALUE ...]",
        epilog=f"{_examples('plan')}\n{EPILOG}",
        formatter_class=_Formatter,
    )
    plan.add_argument("config", type=Path, metavar="FILE", help="YAML configuration")
    plan.add_argument("--gpu", metavar="NAME|FILE", help="device, as h100-80gb, or a YAML file with one")
    plan.add_argument(
        "--memory",
        metavar="SIZE",
        help="device memory to use, as 72GiB (default: activation_offload.gpu_memory_budget, else all)",
    )
    plan.add_argument("--gpus-per-node", type=int, metavar="N", help="in place of cluster.gpus_per_node")
    skew = plan.add_mutually_exclusive_group()
    skew.add_argument("--routing-skew", type=float, metavar="X", help="fullest rank's tokens over the average: factors")
    skew.add_argument("--recorded-run", type=Path, metavar="DIR", help="the same from a run with buffers of fixed size")
    plan.add_argument(
        "--layouts",
        type=_num_layouts,
        nargs="?",
        const=NUM_LAYOUTS,
        metavar="N",
        help=f"search layouts over the same GPUs instead, and print the N fastest (default: {NUM_LAYOUTS})",
    )
    _add_format(plan, "the plan is")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the plan as one HTML page; not with --layouts")
    plan.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write a configuration with the chosen keys; with --layouts, the fastest layout",
    )


def _add_eval(commands: Commands) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="measure how many problems a model solves",
        description="Sample responses to the validation problems, score them, and print pass@k. Without --config and "
        "--checkpoint, a small example that runs anywhere.",
        usage="%(prog)s [options] [KEY=VALUE ...]",
        epilog=f"{_examples('eval')}\n{EPILOG}",
        formatter_class=_Formatter,
    )
    evaluate.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML configuration (default: that of the checkpoint's run)"
    )
    evaluate.add_argument(
        "--checkpoint", type=Path, metavar="RUN_DIR/step_N", help="evaluate this, in place of policy.model_name"
    )
    evaluate.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where figures and responses go (default: results/eval_<name>)"
    )
    _add_format(evaluate, "the figures are")


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look at this machine",
        description="Look at what offloading needs of this machine. Exit code 2 if something makes it impossible.",
        epilog=_examples("doctor"),
        formatter_class=_Formatter,
    )
    _add_format(doctor, "the findings are")
    doctor.add_argument("--write-device", type=Path, metavar="FILE", help="write what a GPU has here, for `plan --gpu`")


def _add_export(commands: Commands) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face folder",
        description="Write the weights of a run's checkpoint as a Hugging Face folder, with the run's tokenizer and "
        "chat template.",
        epilog=_examples("export"),
        formatter_class=_Formatter,
    )
    export.add_argument("checkpoint", type=Path, metavar="RUN_DIR/step_N")
    export.add_argument("destination", type=Path, metavar="OUT", help="a new folder")
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights (default: as they were trained)",
    )
    export.add_argument(
        "--adapter", action="store_true", help="of a run with LoRA: its adapter alone, as peft reads it"
    )


def _add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        help="show a run as one HTML page, or compare several",
        description="Write a page with a run's curves, memory, samples, timings and configuration, which needs nothing "
        "else; or serve it to this machine while the run goes on. Of several runs, print a table of their figures and "
        "of what their configurations have otherwise.",
        epilog=_examples("report"),
        formatter_class=_Formatter,
    )
    report.add_argument("run_dirs", type=Path, metavar="RUN_DIR", nargs="+")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="where the page goes (default: RUN_DIR/report.html; of several: none)"
    )
    _add_format(report, "several runs are")
    report.add_argument("--serve", action="store_true", help="serve the page on 127.0.0.1, refreshed, until Ctrl-C")
    report.add_argument("--port", type=int, metavar="N", help="with --serve: this port (default: a free one)")


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure offloading on this machine",
        description="Measure device memory and step time of this engine beside recomputation and other ways to "
        "offload, on layers of Qwen2.5-7B (offload), or of the paged stash, its copies and a stack of MoE layers "
        "(stash); on a CPU, on a small model, to show that it works.",
        epilog=_examples("bench"),
        formatter_class=_Formatter,
    )
    bench.add_argument("what", choices=("offload", "stash"))
    bench.add_argument("--layers", type=int, metavar="N")
    bench.add_argument("--sequence", type=int, metavar="TOKENS")
    bench.add_argument("--microbatches", type=int, metavar="N", help="offload: per step")
    bench.add_argument("--rounds", type=int, default=5, metavar="N", help="of all variants in turn (default: 5)")
    bench.add_argument(
        "--variant", action="append", metavar="NAME", help="offload: this, as 'ours: all'; may be repeated"
    )
    bench.add_argument("--out", type=Path, metavar="DIR", help="write the figures and a picture there")
    _add_format(bench, "the figures are")


def _add_completion(commands: Commands) -> None:
    commands.add_parser(
        "completion",
        help="print what makes a shell complete commands, options and keys",
        description="Print a script for bash, or for zsh after `autoload -U bashcompinit && bashcompinit`, that "
        "completes commands, options, their values and keys of the configuration.",
        epilog=_examples("completion"),
        formatter_class=_Formatter,
    )
