"""The property tests draw the same examples at every run; `HYPOTHESIS_PROFILE=default pytest` draws new ones."""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
