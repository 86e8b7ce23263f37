"""The property tests draw the same examples at every run; `HYPOTHESIS_PROFILE=default pytest` draws new ones."""

import os

from hypothesis import settings

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets a worker wait for whatever else the machine does
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
