"""Links, hard links and pipes at every name that a run writes: what they lead to stays as it is, and nothing waits.

`python tests/attacks/run_directory_links.py` trains a tiny run and notes every name in its directory that the command
opens, makes, renames or removes. Each of them is then planted, in a copy of the unfinished run that is taken up again
and of the finished one that is reported. What a run takes without a word, such as a link where a file is written aside,
is planted all at once in a run that trains. `--cases N` takes a sample, and leaves that last run out.
"""

import argparse
import contextlib
import hashlib
import io
import os
import random
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

import pytest
from patience import OverdueError, within_patience

from nemo_rl_offload.cli import command_line
from nemo_rl_offload.cli.command_line import main as command

SMALL = (
    "grpo.max_num_steps=3",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.num_prompts_per_step=2",
    "grpo.max_val_samples=16",
    "data.validation.size=16",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=null",
    "checkpointing.is_async=true",
)
KINDS = ("link", "link to nowhere", "pipe", "hard link")
SECRET = "secret of somebody else"
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Heard:
    """Names in a run directory that this process touches. Python never forgets a hook, so it is told when to stop."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.names: set[str] = set()
        self.is_on = True
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in EVENTS:
            for path in arguments[:2]:
                if isinstance(path, str | Path) and (path := Path(path)).is_relative_to(self._run_dir):
                    parts = path.relative_to(self._run_dir).parts
                    self.names.add("/".join(parts[: 2 if parts[:1] == ("checkpoints",) else 1]))


def run(run_dir: Path, *overrides: str) -> tuple[int, str]:
    return _command("run", "grpo", *SMALL, "--run-dir", str(run_dir), *overrides)


def _command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command, in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = command(arguments)
    return code, output.getvalue()


def plant(run_dir: Path, name: str, kind: str, victims: Path, *, secret: bool = False) -> None:
    """Put something strange at a name. What stood there is what it leads to, for then all goes on as usual."""
    path, victim = run_dir / name, victims / name.replace("/", "_")
    victims.mkdir(exist_ok=True)
    if os.path.lexists(path):
        path.rename(victim)
    elif name.split("/")[-1].startswith(("step_", ".step_")) or name in ("checkpoints", "tensorboard", "wandb"):
        victim.mkdir()
        (victim / "file").write_text(SECRET)
    if not victim.exists() or (secret and victim.is_file()):
        victim.write_text(SECRET)
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link":
        path.hardlink_to(victim)
    else:
        path.symlink_to(victim if kind == "link" else victims / "nowhere")


def state_of(folder: Path) -> dict[str, str]:
    """Every file below a folder by its content, and every folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def attack(work: Path, num_cases: int | None, rng: random.Random) -> tuple[int, list[str]]:
    """Returns how many cases there were, and what went wrong."""
    finished, unfinished, wrong = work / "finished", work / "unfinished", list[str]()
    heard = Heard(finished)
    code, output = run(finished)
    heard.is_on = False
    if code:
        return 0, [f"the run itself failed: {output}"]
    names = sorted(heard.names - {"", "."})
    missing = {"config.yaml", ".lock", "metrics.jsonl", "summary.json", "checkpoints/step_3", "scorers.log"} - set(
        names
    )
    if missing:
        return 0, [f"not heard of: {missing}"]
    shutil.copytree(finished, unfinished)
    (unfinished / "summary.json").unlink()
    shutil.rmtree(unfinished / "checkpoints/step_3")
    is_folder = {name: name in ("tensorboard", "checkpoints") or "step_" in name for name in names}
    cases = [(use, *case) for use, *case in product(("run", "report"), names, KINDS)]
    cases = [each for each in cases if not (each[2] == "hard link" and is_folder[each[1]])]
    rng.shuffle(cases)
    entered: dict[str, str] = {}
    for number, (use, name, kind) in enumerate(cases[:num_cases]):
        folder = work / str(number)
        run_dir, victims = folder / "run", folder / "victims"
        shutil.copytree(unfinished if use == "run" else finished, run_dir)
        plant(run_dir, name, kind, victims, secret=use == "report")
        before, case = state_of(victims), f"{use}, {kind} at {name}"
        try:
            with within_patience():
                enters, code, output = _use(use, run_dir)
        except OverdueError:
            wrong.append(f"{case}: waits")
            continue
        if state_of(victims) != before:
            wrong.append(f"{case}: changed what it led to")
        if code not in (0, 2) or "Traceback" in output or (code == 2 and output.count("error: ") != 1):
            wrong.append(f"{case}: ended with {code}: {output}")
        page = run_dir / "report.html"
        if page.is_file() and not page.is_symlink() and page.stat().st_nlink == 1 and SECRET in page.read_text():
            wrong.append(f"{case}: shows what it led to")
        if enters:
            entered[name] = kind
        shutil.rmtree(folder)
    if num_cases is None:
        wrong += _train_among(entered, unfinished, work / "last")
    return len(cases[:num_cases]), wrong


def _use(use: str, run_dir: Path) -> tuple[bool, int, str]:
    """Whether training would have begun; exit code and output."""
    if use == "report":
        return False, *_command("report", str(run_dir))
    begun: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "_train", lambda *_: begun.append(1))
        code, output = run(run_dir)
    return bool(begun), code, output


def _train_among(planted: dict[str, str], unfinished: Path, folder: Path) -> list[str]:
    """A run that trains in a directory with all that a run takes."""
    run_dir, victims = folder / "run", folder / "victims"
    shutil.copytree(unfinished, run_dir)
    for name, kind in planted.items():
        plant(run_dir, name, kind, victims)
    before = state_of(victims)
    code, output = run(run_dir)
    wrong = [] if code == 0 else [f"training among {planted} ended with {code}: {output}"]
    return wrong + [f"training among {planted} changed a victim"] * (state_of(victims) != before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, help="all of them without that")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_cases, wrong = attack(Path(folder), options.cases, random.Random(options.seed))
    print("\n".join([*wrong, f"run_directory_links: {num_cases} cases, {len(wrong)} problems"]))
    return int(bool(wrong) or not num_cases)


if __name__ == "__main__":
    sys.exit(main())
