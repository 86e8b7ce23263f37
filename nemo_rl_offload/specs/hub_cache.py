"""Models and data sets that Hugging Face's hub client has downloaded to this machine. Nothing is fetched here."""

import os
import re
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]
_ID = re.compile(r"[\w.-]+/[\w.-]+")


def cache_folder() -> Path:
    """Where the client keeps downloads, by its own environment variables."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def is_hub_id(name: str) -> bool:
    """Whether a name could be one of the hub's, `OWNER/NAME`."""
    return _ID.fullmatch(name) is not None and ".." not in name


def downloaded(name: str, kind: Kind) -> Path | None:
    """The folder of the newest downloaded snapshot; None where there is none."""
    if not is_hub_id(name):
        return None
    folder = cache_folder() / f"{kind}s--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8")[:100].strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if revision and "/" not in revision and ".." not in revision and snapshot.is_dir() else None


def how_to_download(name: str, kind: Kind) -> str:
    """The command that downloads it."""
    return f"`hf download {name}{' --repo-type dataset' if kind == 'dataset' else ''}`"
