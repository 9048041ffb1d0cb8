"""For ``pytest --nbval notebooks``: what is compared, and that figures/ is left alone."""

import os
from pathlib import Path


def pytest_configure(config):
    if config.getoption("--nbval", False) or config.getoption("--nbval-lax", False):
        figures = Path(__file__).parent / "build" / "nbval" / "figures"
        os.environ.setdefault("PAPERLIB_FIGURES", str(figures))
        os.environ.setdefault("MPLBACKEND", "agg")
        os.environ.setdefault("TQDM_DISABLE", "1")


def pytest_collectstart(collector):
    # warnings differ between versions; that there are none is a guard of its own
    if getattr(collector, "skip_compare", None) is not None:
        collector.skip_compare += ("stderr",)
