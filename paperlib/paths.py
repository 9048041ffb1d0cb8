"""Where things live. The only module that knows the repository's folders.

``PAPERLIB_ROOT`` overrides the repository root, ``PAPERLIB_CACHE`` the cache of large files
(converted models, captured states).
"""

import os
from pathlib import Path


def root() -> Path:
    """The folder that holds notebooks/, figures/ and data/."""
    override = os.environ.get("PAPERLIB_ROOT")
    if override:
        return Path(override).resolve()
    beside = Path(__file__).resolve().parent.parent
    return beside if (beside / "notebooks").is_dir() else Path.cwd()


def cache() -> Path:
    """Large files that can be made again: converted models, captured states."""
    override = os.environ.get("PAPERLIB_CACHE")
    if override:
        return Path(override).resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paperlib"


def notebooks() -> Path:
    return root() / "notebooks"


def build(profile: str) -> Path:
    """Ignored by git: executed notebooks, logs and measured results of a profile."""
    return root() / "build" / profile


def figures(profile: str) -> Path:
    """Only the ``full`` profile writes to figures/."""
    return root() / "figures" if profile == "full" else build(profile) / "figures"


def results(profile: str) -> Path:
    """Small measured results: committed under data/ for ``full``, in build/ otherwise."""
    return root() / "data" / "full" if profile == "full" else build(profile) / "data"
