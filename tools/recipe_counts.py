"""Which recipes of NeMo-RL pass `check`, and why others do not: `python tools/recipe_counts.py FOLDER [--keys]`.

Counts for each feature that recipes are refused by, and for other problems by their key; with `--keys`, how often each
key without effect stands in them.
"""

import re
import sys
import time
from collections import Counter
from pathlib import Path

from nemo_rl_offload.cli.check import check_file
from nemo_rl_offload.config.validation import Findings

_VLLM = "generation by vLLM"


def recipes_in(folder: Path) -> list[Path]:
    """The configurations below a folder."""
    return sorted(path for path in folder.rglob("*.yaml"))


def reasons(found: Findings) -> list[str]:
    """Each problem, short: the feature that is missing, or the key and the message's beginning."""
    short = []
    for problem in found.problems:
        head, is_refused, _ = problem.message.partition(", not supported here")
        if family := re.match(r"model_type '(\w+)' of config.json is not", problem.message):
            short.append(f"models of the family {family[1]}")
        else:
            short.append(head.rpartition("asks for ")[2] if is_refused else f"{problem.path}: {problem.message[:90]}")
    return sorted(set(short))


def main(folder: Path, *, with_keys: bool) -> None:
    """Print the counts."""
    reasons_of: dict[Path, list[str]] = {}
    effectless: Counter[str] = Counter()
    slowest = 0.0
    for path in recipes_in(folder):
        start = time.process_time()
        found = check_file(path, [])
        slowest = max(slowest, time.process_time() - start)
        reasons_of[path] = reasons(found)
        effectless.update(each.path for each in found.without_effect)
    passing = [path for path, why in reasons_of.items() if not why]
    but_for_vllm = [path for path, why in reasons_of.items() if why == [_VLLM]]
    lines = [
        f"{len(reasons_of)} recipes: {len(passing)} pass, {len(but_for_vllm)} more pass but for vLLM; "
        f"{slowest:.1f} s of computing at most"
    ]
    others = [[why for why in each if why != _VLLM] for each in reasons_of.values()]
    alone = Counter(each[0] for each in others if len(each) == 1)
    for reason, num in Counter(why for each in reasons_of.values() for why in each).most_common():
        lines.append(f"{num:4} ({alone[reason]} by it alone)  {reason}")
    if with_keys:
        lines += [f"{num:4}  without effect: {key}" for key, num in effectless.most_common()]
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), with_keys="--keys" in sys.argv)
