"""A small repository with its own copy of the plumbing, two modules and two notebooks.

No model, no torch: what is tested with it is how figures come to be, not what they show.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

import paperlib

PLUMBING = (
    *("__init__", "errors", "files", "paths", "provenance", "profiles", "artifacts"),
    *("pipeline", "published", "cli"),
)

PROFILES = """

@dataclass(frozen=True)
class Toy:
    points: int = at_least(2, "how many points")
    gain: float = at_least(0.0, "slope of the line")
    label: str = text("name of the line")
    seed: int = at_least(0, "seed of the noise")


PARAMETERS.clear()
for _stem in ("01_alpha", "02_beta"):
    PARAMETERS[_stem] = {
        "smoke": Toy(points=4, gain=0.5, label="toy", seed=0),
        "quick": Toy(points=6, gain=0.5, label="toy", seed=0),
        "full": Toy(points=8, gain=0.5, label="toy", seed=0),
    }
"""

ARTIFACTS = """

REGISTRY.clear()
for _id, _kind, _stem in (
    ("fig-alpha", "figure", "01_alpha"),
    ("tab-alpha", "table", "01_alpha"),
    ("fig-beta", "figure", "02_beta"),
):
    REGISTRY[_id] = Artifact(
        _id, _kind, _stem, f"Title of {_id}", f"Caption of {_id}, 95 % of $x_1$.", "alt", "nothing"
    )


def seed_everything(seed: int) -> None:
    import numpy as np

    np.random.seed(seed)
"""

MODULE = '''
"""A line with noise."""

from pathlib import Path

import numpy as np
import pandas as pd

SLOPE = 2.0


def line(run):
    p = run.parameters

    def compute(out: Path) -> None:
        x = np.arange(p.points)
        noise = np.random.default_rng(p.seed).normal(size=p.points)
        np.savez(out, x=x, y=SLOPE * p.gain * x + 0.1 * noise)

    key = {"points": p.points, "gain": p.gain, "seed": p.seed}
    with np.load(run.measured("NAME-line", key, compute)) as archive:
        return pd.DataFrame({"label": p.label, "x": archive["x"], "y": archive["y"]})


def draw(frame):
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(3.25, 2), layout="constrained")
    ax.plot(frame["x"], frame["y"])
    return figure
'''

PARAMETERS_CELL = """\
profile = "full"  # smoke, quick or full
points = -1  # how many points
gain = -1  # slope of the line
label = ""  # name of the line
seed = -1  # seed of the noise
"""


def cells(name: str, stem: str, *, table: bool) -> list[str]:
    """The code cells after the parameters cell."""
    given = "profile=profile, points=points, gain=gain, label=label, seed=seed"
    return [
        f'from paperlib import artifacts, {name}\n\nrun = artifacts.start("{stem}", {given})',
        f"frame = {name}.line(run)\nprint(len(frame), 'points')",
        f'run.figure("fig-{name}", {name}.draw(frame), frame)',
        *([f'run.table("tab-{name}", frame)'] if table else []),
        "run.finish()",
    ]


def write_notebook(path: Path, code: list[str], parameters: str = PARAMETERS_CELL) -> None:
    head = nbformat.v4.new_code_cell(parameters, id="parameters")
    head.metadata["tags"] = ["parameters"]
    body = [nbformat.v4.new_code_cell(c, id=f"cell-{i}") for i, c in enumerate(code)]
    title = nbformat.v4.new_markdown_cell("# A line", id="title")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[title, head, *body], metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


def make(root: Path) -> Path:
    package = root / "paperlib"
    package.mkdir(parents=True)
    source = Path(paperlib.__file__).parent
    for name in PLUMBING:
        shutil.copy(source / f"{name}.py", package)
    shutil.copy(source / "paper.mplstyle", package)
    for name, more in (("profiles", PROFILES), ("artifacts", ARTIFACTS)):
        with open(package / f"{name}.py", "a") as stream:
            stream.write(more)
    for name in ("alpha", "beta"):
        (package / f"{name}.py").write_text(MODULE.replace("NAME", name))
        stem = {"alpha": "01_alpha", "beta": "02_beta"}[name]
        path = root / "notebooks" / f"{stem}.ipynb"
        write_notebook(path, cells(name, stem, table=name == "alpha"))
    (root / "constraints.txt").write_text("")
    (root / "CITATION.cff").write_text('title: "Toy & paper"\nauthors:\n  - name: The Toys\n')
    return root


def environment(root: Path, **more: str) -> dict[str, str]:
    cleared = {k: v for k, v in os.environ.items() if not k.startswith("PAPERLIB_")}
    return {**cleared, "PAPERLIB_ROOT": str(root), "PYTHONPATH": str(root), **more}


def paper(root: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the toy repository's command line."""
    return subprocess.run(
        [sys.executable, "-m", "paperlib.cli", *arguments],
        cwd=root,
        env=environment(root, **more),
        capture_output=True,
        text=True,
        timeout=120,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}
