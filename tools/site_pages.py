"""Lays the site out like the repository, so that one relative link leads the same way in both: a hook of MkDocs.

Pages of `docs/` stand under `docs/`, README.md is the home page, and the READMEs of other folders join them. A file
that a page links to, such as a picture or an example's configuration, goes along; a link to what does not exist is left
to `mkdocs build --strict`.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/cluster/README.md")
LINK = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give each page its path in the repository, and each file that they link to."""
    found = [file for file in files if file.abs_src_path is None or not file.is_documentation_page()]
    paths = {*PAGES, *(f"docs/{file.src_uri}" for file in files if file.is_documentation_page())}
    for path in sorted(paths | {target for page in paths for target in linked(page)}):
        found.append(File.generated(config, path, abs_src_path=str(PROJECT / path)))
    return Files(found)


def linked(page: str) -> set[str]:
    """The files of this repository that a page links to, by their paths in it."""
    targets = LINK.findall((PROJECT / page).read_text(encoding="utf-8"))
    ends = [(PROJECT / PurePosixPath(page).parent / target).resolve() for target in targets if ":" not in target]
    return {end.relative_to(PROJECT).as_posix() for end in ends if end.is_file() and end.is_relative_to(PROJECT)}
