"""Figures and tables with stable ids, and the record of how each was made.

A notebook calls ``run = start(...)``, ``run.figure(id, figure, data)`` or ``run.table(id, frame)``
for each of its artifacts, and ``run.finish()``. Nothing is on disk before ``finish``, which puts
all of them and ``manifest.json`` in place together. Slow numbers go through ``run.measured``.

How a folder of figures changes: the new files and the new manifest are written to ``.incoming``,
which is then renamed to ``.commit`` (the one step that decides), and from there each file is
renamed into place, the manifest last. Whoever finds a ``.commit`` finishes it first; so a process
killed at any moment leaves the old set, or a complete new set, for every reader of the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paperlib import __version__, files, paths, profiles, provenance
from paperlib.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_STYLE = Path(__file__).with_name("paper.mplstyle")

# tqdm asks for widgets inside a kernel; our bars are text, and a run must leave stderr empty
warnings.filterwarnings("ignore", message="IProgress not found")


@dataclass(frozen=True)
class Artifact:
    """One figure or table: its id is the file stem, the label in LaTeX and the manifest key."""

    id: str
    kind: str  # "figure" or "table"
    notebook: str  # stem
    title: str
    caption: str
    alt: str
    refuted_by: str  # what would show the claim wrong


REGISTRY: dict[str, Artifact] = {
    a.id: a
    for a in (
        Artifact(
            "fig-entropy-depth",
            "figure",
            "01_layer_entropy",
            "Entropy over depth",
            "Von Neumann entropy $S_1$ and collision entropy $S_2$ of the hidden states at each "
            "boundary, with and without massive-norm tokens; bands are 95 % intervals over "
            "bootstrap resamples of documents.",
            "Line plots of entropy in nats against boundary, one panel for each measure.",
            "Curves that keep their shape when massive-norm tokens are put back, or bands wider "
            "than the differences between depths.",
        ),
        Artifact(
            "fig-massive-norms",
            "figure",
            "01_layer_entropy",
            "Where massive norms sit",
            "Left: root mean square of the residual stream over depth, for massive-norm tokens "
            "and the rest. Right: what kind of token they are.",
            "A log-scale line plot of state size against boundary, and bars of token kinds.",
            "Massive norms spread evenly over positions and kinds of token.",
        ),
        Artifact(
            "fig-pair-maps",
            "figure",
            "02_concatenation_entropy",
            "Pairs of boundaries",
            "Entropy of each concatenated pair of boundaries, and the part of it that is "
            "complementarity (quantum Jensen-Shannon divergence over log 2).",
            "Two square maps over pairs of boundaries.",
            "Complementarity that does not grow with the distance between boundaries.",
        ),
        Artifact(
            "fig-triple-split",
            "figure",
            "02_concatenation_entropy",
            "Triples over depth",
            "Concatenation entropy of triples over depth, split into the mean entropy of the "
            "members and their divergence.",
            "Lines of mean entropy and of total entropy against the middle boundary.",
            "A total that equals the mean: no divergence between members.",
        ),
        Artifact(
            "fig-triple-landscape",
            "figure",
            "02_concatenation_entropy",
            "All triples",
            "Histogram of the collision entropy of every triple of boundaries, with the default "
            "and the chosen triples marked.",
            "A histogram over all triples with marked positions.",
            "A default triple at the top of the histogram.",
        ),
        Artifact(
            "fig-cka-map",
            "figure",
            "03_cka_geometry",
            "CKA between boundaries",
            "Linear CKA of every pair of boundaries, biased and debiased, with and without "
            "massive-norm tokens; white squares are the compartments found by exact "
            "segmentation.",
            "Four square similarity maps on one scale from 0 to 1, with squares drawn on them.",
            "Compartments that move when documents are resampled.",
        ),
        Artifact(
            "fig-compartment-stability",
            "figure",
            "03_cka_geometry",
            "Stability of compartments",
            "How often bootstrap resamples of documents begin a compartment at each boundary, "
            "and how many compartments they find.",
            "Two bar plots of shares of bootstrap resamples.",
            "Resamples that spread over many boundaries.",
        ),
        Artifact(
            "tab-compartments",
            "table",
            "03_cka_geometry",
            "Compartments",
            "First and last boundary of each compartment, for every map of fig-cka-map.",
            "A table of boundary ranges.",
            "Ranges that differ between the debiased maps with and without massive-norm tokens.",
        ),
        Artifact(
            "fig-token-entropy",
            "figure",
            "04_token_entropy_filtering",
            "Predictive entropy of tokens",
            "Left: entropy of the target's next-token distribution over all usable tokens, "
            "and where the kept shares begin. Right: median and quartiles by position in "
            "the document.",
            "A histogram with vertical lines, and points with error bars against position.",
            "An entropy at the first position that is no higher than at later ones.",
        ),
        Artifact(
            "fig-filter-sinks",
            "figure",
            "04_token_entropy_filtering",
            "What an entropy filter alone does to sinks",
            "Tokens ranked by predictive entropy with nothing dropped first, against a "
            "random ranking: the share of the states' energy in massive-norm tokens (mean "
            "over inner boundaries) and the share of first positions that survive.",
            "Two line plots against the share of tokens kept.",
            "An entropy filter that drops first positions at least as often as a random one.",
        ),
        Artifact(
            "fig-filter-sweep",
            "figure",
            "04_token_entropy_filtering",
            "Filtering against the equal-size control",
            "Statistics of the tokens of highest predictive entropy and of random subsets "
            "of the same size, averaged over boundaries or pairs. Bands: 95 % bootstrap "
            "intervals over documents (filter) and the range over draws (control). Last "
            "panel: Spearman correlation of the S_2 of all triples with that on all usable "
            "tokens.",
            "Six line plots of a statistic against the share of tokens kept.",
            "Filtered statistics within the band of the random control.",
        ),
        Artifact(
            "tab-filter-sensitivity",
            "table",
            "04_token_entropy_filtering",
            "Sensitivity of the choice to the filter",
            "The triple of largest debiased S_2 for every kept share and for entropy taken "
            "at t or t + 1, with the rank of the default rule among all triples of inner "
            "boundaries.",
            "A table with a row for each threshold.",
            "Choices that do not depend on threshold and shift.",
        ),
        Artifact(
            "tab-selection",
            "table",
            "05_layer_selection",
            "What every method chooses",
            "Sets of three boundaries by method and filter: how often bootstrap resamples "
            "of documents choose the same set within one boundary, what each criterion says "
            "of the set, and the held-out score of the ridge probe with its 95 % interval.",
            "A table with a row for each method.",
            "Methods that agree, or whose sets the probe scores above every fixed rule.",
        ),
        Artifact(
            "tab-default-rank",
            "table",
            "05_layer_selection",
            "Rank of the default rule",
            "Rank of [2, N//2, N-3] among all triples of inner boundaries by each "
            "criterion, with the 90 % interval over bootstrap resamples of documents.",
            "A table with a row for each criterion.",
            "A default rule that ranks at the top by every criterion.",
        ),
        Artifact(
            "fig-selection-landscape",
            "figure",
            "05_layer_selection",
            "The landscape of all triples",
            "Every triple of inner boundaries by informativeness and redundancy; colour is "
            "the exact collision entropy of the concatenation, which both determine.",
            "A scatter plot of all triples with marked sets.",
            "A default rule at the lower right edge of the cloud.",
        ),
        Artifact(
            "fig-selection-stability",
            "figure",
            "05_layer_selection",
            "Stability of selection",
            "How often each boundary is chosen over bootstrap resamples of documents, by "
            "method and filter; squares mark the choice on all documents.",
            "A map of methods against boundaries.",
            "Rows that are dark except at their squares: choices that never change.",
        ),
        Artifact(
            "fig-set-size",
            "figure",
            "05_layer_selection",
            "How many boundaries",
            "Collision entropy of the best set of k inner boundaries, of fixed rules, and "
            "of random sets.",
            "Lines of entropy against set size.",
            "A best set no better than random sets of the same size.",
        ),
        Artifact(
            "fig-probe-correlation",
            "figure",
            "05_layer_selection",
            "Criteria against the probe",
            "Left: held-out R2 of the ridge probe against S_2 of the set, a point a set. "
            "Right: Spearman correlation of each criterion with the probe over these sets, "
            "95 % intervals from resampling documents and sets; depth alone stands among "
            "the criteria.",
            "A scatter plot, and correlations with error bars.",
            "A criterion whose correlation exceeds that of depth.",
        ),
    )
}


def declared(stem: str, registry: Mapping[str, Artifact]) -> list[str]:
    """Ids that notebook ``stem`` must make."""
    return [a.id for a in registry.values() if a.notebook == stem]


# the folder of figures


def is_published(stem: str, profile: str, parameters: Any) -> bool:
    """Only the ``full`` profile with none of its values changed is fit for citing."""
    return profile == "full" and parameters == profiles.resolve(stem, "full")


def mark_of(stem: str, profile: str, parameters: Any) -> str:
    """What is written on figures that are not to be cited; "" for those that are."""
    if is_published(stem, profile, parameters):
        return ""
    changed = "" if profile != "full" else " with changed parameters"
    return f"{profile} profile{changed} - not for citing"


def caption_of(artifact: Artifact, mark: str) -> str:
    return artifact.caption + (f" [{mark}]" if mark else "")


def figures_folder(stem: str, profile: str, parameters: Any) -> Path:
    """figures/ for the published numbers, build/<profile>/figures for everything else.

    ``PAPERLIB_FIGURES`` overrides both: checks that execute notebooks leave figures/ alone by it.
    """
    override = os.environ.get("PAPERLIB_FIGURES")
    if override:
        return Path(override)
    published = is_published(stem, profile, parameters)
    return paths.figures("full") if published else paths.build(profile) / "figures"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock  # released by the system when its holder dies

    lock = paths.root() / "build" / f"figures-{files.key(str(folder.resolve()))}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        yield


def _roll_forward(folder: Path) -> None:
    """Finish a commit that was decided, drop one that was not. Needs the lock."""
    shutil.rmtree(folder / ".incoming", ignore_errors=True)
    commit = folder / ".commit"
    if not commit.is_dir():
        return
    if (commit / "manifest.json").is_file():  # else all was moved, only the empty folder is left
        old = _entries(folder / "manifest.json")
        new = _entries(commit / "manifest.json")
        for name in _file_names(old) - _file_names(new):
            (folder / name).unlink(missing_ok=True)
        for path in sorted(commit.iterdir()):
            if path.name != "manifest.json":
                os.replace(path, folder / path.name)
        os.replace(commit / "manifest.json", folder / "manifest.json")
    shutil.rmtree(commit)


def _entries(path: Path) -> dict[str, Any]:
    return read_json(path).get("artifacts", {})


def _file_names(entries: dict[str, Any]) -> set[str]:
    return {f["path"] for entry in entries.values() for f in entry["files"]}


def read_manifest(folder: Path) -> dict[str, Any]:
    """id -> record, after an interrupted commit, if there is one, has been finished."""
    if (folder / ".commit").exists() or (folder / ".incoming").exists():
        with _locked(folder):
            _roll_forward(folder)
    return _entries(folder / "manifest.json")


def _commit(
    folder: Path, stem: str, contents: dict[str, bytes], entries: dict[str, dict[str, Any]]
) -> None:
    """Replace everything of notebook ``stem`` in ``folder``, all together or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _roll_forward(folder)
        old = _entries(folder / "manifest.json")
        new = {i: e for i, e in old.items() if e["notebook"]["stem"] != stem}
        for name, entry in entries.items():
            # an equal result keeps its first date and machine, so that a rerun changes no byte
            new[name] = old[name] if name in old and stable(old[name]) == stable(entry) else entry
        incoming = folder / ".incoming"
        incoming.mkdir()
        for file_name, content in contents.items():
            (incoming / file_name).write_bytes(content)
        files.write_json(incoming / "manifest.json", {"schema": 1, "artifacts": new})
        os.rename(incoming, folder / ".commit")
        _roll_forward(folder)


def _write_pending(
    folder: Path, contents: dict[str, bytes], entries: dict[str, dict[str, Any]]
) -> None:
    with files.replacing(folder) as temporary:
        temporary.mkdir()
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
        files.write_json(temporary / "manifest.json", {"artifacts": entries})


def commit_pending(pending: Path, stem: str, folder: Path) -> None:
    """Put in place what a finished run of notebook ``stem`` has left in ``pending``."""
    entries = _entries(pending / "manifest.json")
    contents = {name: (pending / name).read_bytes() for name in _file_names(entries)}
    _commit(folder, stem, contents, entries)
    shutil.rmtree(pending)


def stable(entry: dict[str, Any]) -> dict[str, Any]:
    """A record without what changes from run to run: date, duration, machine, commit.

    Through JSON, because what is compared with it was read from JSON.
    """
    return json.loads(files.canonical({k: v for k, v in entry.items() if k != "volatile"}))


def relative(path: Path) -> str:
    """Relative to the repository; only the name of what lies outside, so no machine path leaks."""
    path = Path(path).resolve()
    root = paths.root().resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def outdated(
    stem: str, profile: str, parameters: Any, registry: Mapping[str, Artifact]
) -> list[str]:
    """Why notebook ``stem`` has to run (again); empty when its artifacts are current."""
    folder = figures_folder(stem, profile, parameters)
    entries = read_manifest(folder)
    ids = declared(stem, registry)
    reasons = [f"{i} is not made yet" for i in ids if i not in entries]
    made = {i: e for i, e in entries.items() if e["notebook"]["stem"] == stem}
    reasons += [f"{i} is no longer declared" for i in made if i not in ids]
    if reasons:
        return reasons
    for name, entry in made.items():
        artifact = registry[name]
        caption = caption_of(artifact, mark_of(stem, profile, parameters))
        now = (artifact.kind, artifact.title, caption)
        if (entry["kind"], entry["title"], entry["caption"]) != now:
            reasons.append(f"{name}: title or caption changed")
        reasons += [
            f"{f['path']} differs from its record"
            for f in entry["files"]
            if not (folder / f["path"]).is_file() or files.sha256(folder / f["path"]) != f["sha256"]
        ]
        reasons += changes(entry, dataclasses.asdict(parameters))
    return sorted(set(reasons), key=reasons.index)


def changes(entry: dict[str, Any], parameters: dict[str, Any] | None = None) -> list[str]:
    """What an artifact was made from that is different today."""
    reasons = []
    notebook = paths.notebooks() / f"{entry['notebook']['stem']}.ipynb"
    if provenance.notebook_hash(notebook) != entry["notebook"]["sha256"]:
        reasons.append(f"code cells of {relative(notebook)} changed")
    now, then = provenance.notebook_modules(notebook), entry["modules"]
    changed = [m for m in sorted(now | then) if now.get(m) != then.get(m)]
    if changed:
        reasons.append(f"code changed: {', '.join(changed)}")
    if parameters is not None and parameters != entry["parameters"]:
        old = entry["parameters"]
        names = [n for n in parameters | old if parameters.get(n) != old.get(n)]
        reasons.append(f"parameters changed: {', '.join(names)}")
    if provenance.constraints_hash() != entry["constraints"]:
        reasons.append("constraints.txt changed")
    for used in entry["data"]:
        path = paths.root() / used["path"]
        if used["outside"]:
            continue  # a file of the user's, of which only the name is known
        if not path.is_file():
            reasons.append(f"{used['path']} is gone")
        elif files.sha256(path) != used["sha256"]:
            reasons.append(f"{used['path']} changed")
    return reasons


# a run of one notebook


@dataclass
class Run:
    """One execution of a notebook. Made by ``start``; ``parameters`` are the resolved ones."""

    stem: str
    profile: str
    parameters: Any
    registry: Mapping[str, Artifact]
    remeasure: bool
    notebook_sha256: str
    modules: dict[str, str]
    began: float = field(default_factory=time.time)
    _made: dict[str, dict[str, bytes]] = field(default_factory=dict)  # id -> file name -> content
    _used: dict[str, dict[str, Any]] = field(default_factory=dict)
    _inputs: set[str] = field(default_factory=set)

    @property
    def published(self) -> bool:
        return is_published(self.stem, self.profile, self.parameters)

    @property
    def mark(self) -> str:
        return mark_of(self.stem, self.profile, self.parameters)

    def _artifact(self, id: str, kind: str) -> Artifact:
        artifact = self.registry.get(id)
        if artifact is None or artifact.notebook != self.stem or artifact.kind != kind:
            ids = [i for i in declared(self.stem, self.registry) if self.registry[i].kind == kind]
            raise InputError(
                f"{id!r} is not a {kind} of notebook {self.stem}: it declares "
                f"{', '.join(ids) or 'none'} (paperlib/artifacts.py)"
            )
        return artifact

    def _caption(self, artifact: Artifact) -> str:
        return caption_of(artifact, self.mark)

    def figure(self, id: str, figure: Figure, data: pd.DataFrame | dict[str, pd.DataFrame]) -> None:
        """Keep a figure as PDF and PNG and the numbers it shows as ``<id>.csv``; show it.

        A dict of frames becomes ``<id>.<name>.csv`` each.
        """
        from matplotlib import pyplot as plt
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        artifact = self._artifact(id, "figure")
        if self.mark:
            margin = 0.13 / figure.get_figheight()  # a line below everything else
            engine = figure.get_layout_engine()
            if isinstance(engine, ConstrainedLayoutEngine):
                engine.set(rect=(0, margin, 1, 1 - margin))
            text = figure.text(0.995, 0.005, self.mark, ha="right", va="bottom", fontsize=6)
            text.set(color="#b00020", gid="profile-mark")
        subject = f"{id}, {self.profile} profile"
        creator = f"paperlib {__version__}"
        pdf = {
            **{"Title": artifact.title, "Subject": subject, "Keywords": id, "Creator": creator},
            **{"Producer": "matplotlib", "CreationDate": None},
        }
        png = {"Title": artifact.title, "Description": subject, "Source": creator, "Software": None}
        with plt.rc_context(), plt.style.context(str(_STYLE)):  # font embedding is decided here
            made = {
                f"{id}.pdf": _rendered(figure, "pdf", 300, pdf),
                f"{id}.png": _rendered(figure, "png", 300, png),
            }
            _show(figure, artifact.title)
        plt.close(figure)
        for name, frame in data.items() if isinstance(data, dict) else [("", data)]:
            made[f"{id}.{name}.csv" if name else f"{id}.csv"] = _csv(frame)
        self._made[id] = made

    def table(self, id: str, frame: pd.DataFrame, *, digits: int = 3) -> None:
        """Keep a table as CSV (all digits), Markdown and LaTeX (rounded); print it."""
        artifact = self._artifact(id, "table")
        caption = self._caption(artifact)
        shown = frame.reset_index() if any(frame.index.names) else frame
        shown = shown.map(lambda v: f"{v:.{digits}g}" if isinstance(v, float) else str(v))
        markdown = shown.to_markdown(index=False, disable_numparse=True)
        style = shown.style.hide(axis="index").format(escape="latex")
        latex = style.format_index(escape="latex", axis=1).to_latex(
            hrules=True, label=id, caption=_latex(caption), position_float="centering"
        )
        self._made[id] = {
            f"{id}.csv": _csv(frame),
            f"{id}.md": f"{markdown}\n\n{caption}\n".encode(),
            f"{id}.tex": latex.encode(),
        }
        print(markdown)

    def uses(self, path: Path) -> Path:
        """Record that the numbers come from this file."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no file {path}: {self.stem} says that it uses it")
        root = paths.root().resolve()
        self._used[str(path)] = {
            "path": relative(path),
            "outside": not path.resolve().is_relative_to(root),
            "sha256": files.sha256(path),
        }
        owner = self.registry.get(path.name.split(".")[0])
        if owner is not None and path.parent == paths.figures(self.profile):
            self._inputs.add(owner.id)
        return path

    def measured(
        self,
        name: str,
        key: dict[str, Any],
        compute: Callable[[Path], None],
        suffix: str = ".npz",
    ) -> Path:
        """The file of a slow measurement, computed by ``compute(path)`` unless it is there.

        ``key`` holds everything that the numbers depend on apart from code. Looked up in
        data/full/ first (profile ``full`` only: the committed numbers, whatever today's code), then
        in build/<profile>/cache, where the code of compute's module and of all it imports is part
        of the key. ``remeasure`` computes again and, in an unchanged ``full`` profile, renews
        data/full/. Beside each file lies its record, ``<name>.record.json``.
        """
        key = json.loads(files.canonical(key))
        committed = paths.results("full") / f"{name}{suffix}"
        if self.profile == "full" and not self.remeasure:
            record = read_record(committed)
            if record is not None and record["key"] == key:
                if not committed.is_file() or files.sha256(committed) != record["sha256"]:
                    raise InputError(
                        f"{relative(committed)} is missing or damaged: its record has another "
                        "sha256; restore it from git, or run with --remeasure"
                    )
                return self.uses(committed)

        code = self._code_of(compute)
        folder = paths.build(self.profile) / "cache"
        cached = folder / f"{name}-{files.key([key, code])}{suffix}"
        if not self._is_current(cached):
            _measure(cached, name, key, code, compute)
        if not (self.remeasure and self.published):
            return self.uses(cached)
        record_path(committed).unlink(missing_ok=True)  # never a record beside another's numbers
        with files.replacing(committed) as temporary:
            shutil.copyfile(cached, temporary)
        files.write_json(record_path(committed), read_record(cached))
        return self.uses(committed)

    def _is_current(self, cached: Path) -> bool:
        """Whole and, in a run that measures again, made after that run was asked for."""
        record = read_record(cached)
        if record is None or not cached.is_file() or files.sha256(cached) != record["sha256"]:
            return False
        if not self.remeasure:
            return True
        asked = float(os.environ.get("PAPERLIB_REMEASURE") or 1)
        since = asked if asked > 1 else self.began  # "1" is a plain switch
        return datetime.datetime.fromisoformat(record["created"]).timestamp() >= since

    def _code_of(self, compute: Any) -> dict[str, str]:
        module = getattr(getattr(compute, "func", compute), "__module__", "") or ""
        if module.split(".")[0] == "paperlib":
            return provenance.modules([module])
        return {**self.modules, "notebook": self.notebook_sha256}  # written in the notebook itself

    def finish(self) -> None:
        """Put all artifacts in place and say where each one is.

        Raises InputError when an artifact that the registry declares was not made.
        """
        missing = [i for i in declared(self.stem, self.registry) if i not in self._made]
        if missing:
            raise InputError(
                f"notebook {self.stem} did not make {', '.join(missing)}: call run.figure or "
                "run.table for each, or remove it from the registry; nothing was written"
            )
        volatile = {
            "environment": provenance.environment(),
            "created": _now(),
            "seconds": round(time.time() - self.began, 1),
            "commit": provenance.git_commit(),
        }
        common = {
            "notebook": {
                "stem": self.stem,
                "path": f"notebooks/{self.stem}.ipynb",
                "sha256": self.notebook_sha256,
            },
            "parameters": dataclasses.asdict(self.parameters),
            "profile": self.profile,
            "seed": getattr(self.parameters, "seed", 0),
            "modules": self.modules,
            "tree": files.key(self.modules),
            "constraints": provenance.constraints_hash(),
            "data": sorted(self._used.values(), key=lambda used: used["path"]),
            "inputs": sorted(self._inputs),
            "version": __version__,
            "volatile": volatile,
        }
        entries: dict[str, dict[str, Any]] = {}
        contents: dict[str, bytes] = {}
        for id, made in self._made.items():
            artifact = self.registry[id]
            records = [_file_record(name, content) for name, content in sorted(made.items())]
            contents |= made
            entries[id] = {
                **{"id": id, "kind": artifact.kind, "title": artifact.title},
                "caption": self._caption(artifact),
                "files": records,
                **common,
            }
        pending = os.environ.get("PAPERLIB_PENDING")
        if pending:  # the runner commits, after it has looked at every cell
            _write_pending(Path(pending), contents, entries)
        else:
            folder = figures_folder(self.stem, self.profile, self.parameters)
            _commit(folder, self.stem, contents, entries)
        place = paths.figures("full") if self.published else paths.build(self.profile) / "figures"
        for id, made in self._made.items():
            suffixes = " ".join(sorted(name.removeprefix(id) for name in made))
            print(f"{relative(place)}/{id}  {suffixes}\n  {self._caption(self.registry[id])}")


def start(
    stem: str,
    *,
    profile: str,
    registry: Mapping[str, Artifact] = REGISTRY,
    remeasure: bool | None = None,
    **overrides: Any,
) -> Run:
    """Begin notebook ``stem``: check and print the parameters, seed every generator.

    ``overrides`` are the notebook's parameters; a sentinel (-1 or "") stands for the profile's
    value. ``remeasure`` None reads the environment variable ``PAPERLIB_REMEASURE``.
    """
    parameters = profiles.resolve(stem, profile, overrides)
    expected = os.environ.get("PAPERLIB_PREFIX", sys.prefix)
    if Path(expected).resolve() != Path(sys.prefix).resolve():
        raise InputError(
            f"the kernel runs in {sys.prefix}, paperlib in {expected}: a kernel of your own named "
            "python3 shadows it; remove it (jupyter kernelspec list shows where it is)"
        )
    if remeasure is None:
        remeasure = os.environ.get("PAPERLIB_REMEASURE", "") not in ("", "0")
    notebook = paths.notebooks() / f"{stem}.ipynb"
    run = Run(
        stem,
        profile,
        parameters,
        registry,
        remeasure,
        provenance.notebook_hash(notebook),
        provenance.notebook_modules(notebook),
    )
    seed_everything(getattr(parameters, "seed", 0))
    print(f"{stem}, {profile} profile")
    for name, value in dataclasses.asdict(parameters).items():
        print(f"  {name} = {value}")
    return run


def seed_everything(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  what a library draws without asking
    torch.manual_seed(seed)


# measured results


def record_path(result: Path) -> Path:
    return result.with_name(f"{result.stem}.record.json")


def read_record(result: Path) -> dict[str, Any] | None:
    """Key, hash, code and machine of a measured file; None when there is no whole record."""
    return read_json(record_path(result)) or None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _measure(
    out: Path,
    name: str,
    key: dict[str, Any],
    code: dict[str, str],
    compute: Callable[[Path], None],
) -> None:
    """Compute into ``out``; the record comes last, so a file without one does not count."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record_path(out).unlink(missing_ok=True)
    began = time.time()
    # in a folder of its own, with its final name: numpy and others look at the suffix
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".making-") as folder:
        made = Path(folder) / out.name
        compute(made)
        if not made.is_file():
            raise InputError(f"measuring {name} wrote no file: compute(path) must write to path")
        os.replace(made, out)
    record = {
        **{"name": name, "key": key, "code": code, "sha256": files.sha256(out)},
        **{"bytes": out.stat().st_size, "seconds": round(time.time() - began, 1)},
        **{"created": _now(), "environment": provenance.environment()},
    }
    files.write_json(record_path(out), record)


# bytes


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


def _file_record(name: str, content: bytes) -> dict[str, Any]:
    return {"path": name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _rendered(figure: Figure, format: str, dpi: int, metadata: dict[str, Any] | None) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=format, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


def _show(figure: Figure, title: str) -> None:
    """In a notebook, whatever the backend, and small enough for one that is committed."""
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        return
    from IPython.display import Image, display

    display(Image(_rendered(figure, "png", 80, {"Software": None}), alt=title))


def _csv(frame: pd.DataFrame) -> bytes:
    """All digits; the index only where it has a name."""
    named = any(name is not None for name in frame.index.names)
    return frame.to_csv(index=named, lineterminator="\n").encode()


def _latex(caption: str) -> str:
    """Escape what LaTeX reads as commands, outside of $...$."""
    parts = caption.split("$")
    for i in range(0, len(parts), 2):
        for char in "&%#_":
            parts[i] = parts[i].replace(char, f"\\{char}")
    return "$".join(parts)
