"""Records of megabytes, in shapes that cost the most: what is made of them, in which time and memory.

    python tests/attacks/big_records.py [--megabytes 8] [--cases NAME ...]

Each case is a data set with one huge record among small ones, read and encoded as a run does it, in a process whose
memory and time are measured. The attack succeeds where a process takes more than `PATIENCE_S`, or
`MAX_EXTRA_MB` over one without the huge record. That the same comes out as from all of the record is a unit test's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from patience import PATIENCE_S

MAX_EXTRA_MB = 600
"""Encoding 8 MB as a whole took 1,700 MB."""
MAX_LENGTH = 64
SMALL = [{"prompt": f"say {n}", "completion": f"it is {n}"} for n in range(8)]


def _words(num: int) -> str:
    return "word " * (num // 5)


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "words": lambda n: {"prompt": "say", "completion": _words(n)},
    "one_word": lambda n: {"prompt": "say", "completion": "x" * n},
    "blanks": lambda n: {"prompt": "say", "completion": "a" + " " * n + "b"},
    "digits": lambda n: {"prompt": "say", "completion": "7" * n},
    "marks": lambda n: {"prompt": "say", "completion": "e" + "\u0301" * (n // 2)},
    "emoji": lambda n: {"prompt": "say", "completion": "\U0001f642" * (n // 4)},
    "long_prompt": lambda n: {"prompt": _words(n), "completion": "yes"},
    "turns": lambda n: {
        "messages": [
            {"role": role, "content": _words(1000)} for _ in range(n // 2000) for role in ("user", "assistant")
        ]
    },
    "values": lambda n: {"prompt": "say", "completion": "yes", "other": [[]] * (n // 3)},
    "special": lambda n: {"prompt": "say", "completion": "<|im_end|>" * (n // 10)},
}

_CHILD = """
import json, resource, sys, time
from pathlib import Path
from big_records import read
import transformers, nemo_rl_offload.data.samples
begin = time.process_time()
rows, counts = read(Path(sys.argv[1]))
print(json.dumps({"counts": counts, "seconds": time.process_time() - begin,
                  "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}))
"""


def read(file: Path) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of the samples of a file, and the counts."""
    from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
    from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer
    from nemo_rl_offload.data.samples import sample_sets

    overrides = [f"data.train.path={file}", f"policy.max_total_sequence_length={MAX_LENGTH}"]
    config: Any = load_config(
        PROJECT_ROOT / "examples/configs/sft_tiny.yaml",
        [*overrides, "policy.train_global_batch_size=2", "data.on_bad_line=skip", "data.prompt_template=null"],
    )
    tokenizer, end_ids = load_policy_tokenizer(config["policy"], None)
    stream, _, counts = sample_sets(config, tokenizer, end_ids, seed=0)
    rows = [row.token_ids for _ in range(stream.num_batches) for sample in stream.next_batch() for row in sample]
    return rows, vars(counts["data.train"])


def measured(file: Path) -> dict[str, Any]:
    """The counts, in a process of its own, with its seconds and its memory."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr.splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def attack(names: list[str], num_bytes: int, folder: Path) -> list[str]:
    """What succeeded, one line each."""
    small = folder / "small.jsonl"
    small.write_text("".join(json.dumps(row) + "\n" for row in SMALL))
    base_mb = measured(small)["mb"]
    harm = []
    for name in names:
        file = folder / f"{name}.jsonl"
        with file.open("w") as lines:
            for row in [*SMALL[:4], CASES[name](num_bytes), *SMALL[4:]]:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        found = measured(file)
        file.unlink()
        if "error" in found:
            harm.append(f"{name}: {found['error']}")
            continue
        print(f"{name:12} {found['seconds']:6.1f} s {found['mb'] - base_mb:6} MB more  {found['counts']}")
        if found["mb"] - base_mb > MAX_EXTRA_MB:
            harm.append(f"{name}: {found['mb'] - base_mb} MB")
    return harm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        harm = attack(options.cases, int(options.megabytes * 1e6), Path(folder))
    print("\n".join(harm))
    print(f"{len(options.cases)} huge records, {len(harm)} did harm")
    return bool(harm)


if __name__ == "__main__":
    sys.exit(main())
