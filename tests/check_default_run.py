"""Check the summary of the default run: `python tests/check_default_run.py SUMMARY_JSON`."""

import json
import sys
from pathlib import Path

LEAST_RISE = 0.15


def main() -> None:
    summary = json.loads(Path(sys.argv[1]).read_text())
    first, last = summary["validation"]["first"], summary["validation"]["last"]
    offload = summary["offload"]
    print(f"validation {first:.3f} -> {last:.3f} in {summary['wall_seconds']:.0f} s")
    assert last - first >= LEAST_RISE, f"validation rose by less than {LEAST_RISE}"
    assert set(offload["per_module"]) == set(offload["modules"])
    idle = [name for name, moved in offload["per_module"].items() if moved["bytes_out"] == 0]
    assert not idle, f"listed for offloading, but nothing moved: {idle}"
    assert offload["bytes_in"] == offload["bytes_out"], "something that was offloaded never came back"


if __name__ == "__main__":
    main()
