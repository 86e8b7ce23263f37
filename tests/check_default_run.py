"""Check the summary of the default run: `python tests/check_default_run.py SUMMARY_JSON`."""

import json
import re
import sys
from pathlib import Path

from nemo_rl_offload.observability.summary_table import summary_table

LEAST_RISE = 0.15
README = Path(__file__).parents[1] / "README.md"


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
    shown = [str(cell).strip() for cell in summary_table(summary).columns[0].cells]
    written = [name for line in re.findall(r"^│([^│]+)│", README.read_text(), re.MULTILINE) if (name := line.strip())]
    assert written == shown, f"README's table has other rows: {sorted(set(written) ^ set(shown))}"


if __name__ == "__main__":
    main()
