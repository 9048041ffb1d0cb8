"""Which notebook runs when, with which parameters, and whether it has to.

doit orders the notebooks and skips those that are current, papermill executes them. A notebook is
current when its artifacts are what manifest.json says, and code cells, parameters, paperlib
modules, measured files and constraints are what they were made from (``artifacts.outdated``).
"""

import ast
import contextlib
import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.text import Text

from paperlib import artifacts, files, paths, profiles, provenance
from paperlib.artifacts import REGISTRY, Artifact
from paperlib.errors import InputError

# stem -> stems of the notebooks whose artifacts it reads; all others are independent
AFTER: dict[str, tuple[str, ...]] = {}

# a first guess for the time left, in seconds for a notebook that was never timed here
_GUESS = {"smoke": 30.0, "quick": 240.0, "full": 60.0}
_HOUR = 3600
_EXITS = ("exit", "_exit", "abort")  # sys.exit, os._exit, os.abort
_EMBEDDED = "smollm2-135m"  # targets.EMBEDDED, without the import of torch that it costs


def stems() -> list[str]:
    """The notebooks, in the order of their numbers."""
    found = sorted(p.stem for p in paths.notebooks().glob("[0-9]*.ipynb"))
    if not found:
        raise InputError(
            f"no notebooks in {paths.notebooks()}: run inside the repository or set PAPERLIB_ROOT"
        )
    return found


# checks before a kernel starts


def check_notebook(stem: str, registry: Mapping[str, Artifact] = REGISTRY) -> None:
    """Refuse a notebook whose parameters would not do what they say.

    Its parameters cell must hold the profile "full" and the sentinel of every parameter, each with
    a comment (papermill's help); it must call ``start`` with its own name; and every parameter
    must be read, in a later cell or in a module that the notebook imports.
    """
    import nbformat

    path = paths.notebooks() / f"{stem}.ipynb"
    where = artifacts.relative(path)
    known = profiles.fields(stem)
    if not artifacts.declared(stem, registry):
        raise InputError(f"{where} declares no artifact: add one to paperlib/artifacts.py")
    notebook = nbformat.read(path, as_version=4)
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    tagged = [i for i, c in enumerate(cells) if "parameters" in c.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise InputError(f"{where} has {len(tagged)} cells tagged parameters: it needs exactly one")
    given = _assignments(cells[tagged[0]].source, where)
    wanted = {"profile": "full", **{n: profiles.sentinel(f.type) for n, f in known.items()}}
    for name in wanted | given:
        if name not in given or name not in wanted:
            verb = "lacks" if name in wanted else "has the unknown"
            raise InputError(
                f"{where}: the parameters cell {verb} parameter {name!r}; paperlib/profiles.py has "
                f"{', '.join(wanted)}"
            )
        if type(given[name]) is not type(wanted[name]) or given[name] != wanted[name]:
            raise InputError(
                f"{where}: {name} = {given[name]!r} in the parameters cell, expected "
                f"{wanted[name]!r}, which stands for the profile's value"
            )
    later = [provenance.parse_cell(c.source) for c in cells[tagged[0] + 1 :]]
    for node in (n for tree in later for n in ast.walk(tree)):
        if getattr(node, "id", "") in ("exit", "quit") or getattr(node, "attr", "") in _EXITS:
            raise InputError(f"{where}: {ast.unparse(node)} ends the kernel before the last cell")
    calls = [n for tree in later for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args]
    starts = [n for n in calls if ast.unparse(n.func).split(".")[-1] == "start"]
    if len(starts) != 1 or ast.unparse(starts[0].args[0]) != repr(stem):
        raise InputError(f"{where} must call artifacts.start({stem!r}, ...) exactly once")
    passed = {k.arg for k in starts[0].keywords if k.arg and ast.unparse(k.value) == k.arg}
    read = _names_read(later, starts[0]) | _attributes_of_modules(path) | {"profile", "seed"}
    for name in wanted:
        if name not in passed:
            raise InputError(f"{where}: parameter {name!r} is not given to start({name}={name})")
        if name not in read:
            raise InputError(
                f"{where}: parameter {name!r} is not read by any later cell or imported module: "
                "use it or remove it from paperlib/profiles.py and the notebook"
            )


def _assignments(source: str, where: str) -> dict[str, Any]:
    given = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            raise InputError(f"{where}: the parameters cell holds {ast.unparse(node)!r}")
        if "#" not in source.splitlines()[node.lineno - 1]:
            raise InputError(f"{where}: parameter {node.targets[0].id!r} has no comment")
        given[node.targets[0].id] = ast.literal_eval(node.value)
    return given


def _names_read(trees: Sequence[ast.AST], start: ast.AST) -> set[str]:
    """Names and attributes that the cells read, handing a name on to start(...) apart."""
    inside = set(ast.walk(start))
    nodes = [n for t in trees for n in ast.walk(t) if n not in inside]
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return names | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def _attributes_of_modules(notebook: Path) -> set[str]:
    """Attributes ``.x`` that the notebook's paperlib modules read, the plumbing's apart."""
    plumbing = {"paperlib.artifacts", "paperlib.profiles", "paperlib.provenance"}
    found: set[str] = set()
    for name in set(provenance.notebook_modules(notebook)) - plumbing:
        path = provenance.module_file(name) if name.startswith("paperlib") else None
        if path is not None:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return found


# one notebook


def executed_path(stem: str, profile: str) -> Path:
    """Where the executed notebook of a run is kept, also of a failed one."""
    return paths.build(profile) / "notebooks" / f"{stem}.ipynb"


def run_notebook(
    stem: str,
    profile: str,
    parameters: Any,
    *,
    remeasure: float = 0.0,
    timeout: int = 6 * _HOUR,
    on_cell: Callable[[int, int], None] = lambda done, cells: None,
) -> None:
    """Execute a notebook with typed parameters and insist on what success means.

    remeasure: measure again what is older than this time stamp; 0 for nothing.
    timeout: seconds for one cell.
    Raises InputError with the failing cell's source and last line unless every cell ran to its
    end, nothing was written to stderr and every declared artifact was put in place.
    """
    import papermill
    from papermill.engines import NBClientEngine, papermill_engines
    from traitlets.config import Config

    class Watched(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            complete, done = nb_man.cell_complete, iter(range(1, 1 + len(nb_man.nb.cells)))

            def cell_complete(*args: Any, **kwargs: Any) -> None:
                complete(*args, **kwargs)
                on_cell(next(done), len(nb_man.nb.cells))

            nb_man.cell_complete = cell_complete
            return super().execute_managed_notebook(nb_man, kernel_name, **options)

    papermill_engines.register("paperlib", Watched)
    out = executed_path(stem, profile)
    out.parent.mkdir(parents=True, exist_ok=True)
    pending = paths.build(profile) / "pending" / stem
    shutil.rmtree(pending, ignore_errors=True)
    pins = {
        "PAPERLIB_ROOT": str(paths.root()),
        "PAPERLIB_PREFIX": sys.prefix,
        "PAPERLIB_PENDING": str(pending),
        "PAPERLIB_REMEASURE": repr(remeasure) if remeasure else "",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "MPLBACKEND": "agg",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": "315532800",
        "TQDM_DISABLE": "1",
    }
    if getattr(parameters, "target", "") == _EMBEDDED:
        pins["HF_HUB_OFFLINE"] = "1"  # nothing is to be fetched
    error: Exception | None = None
    with _environment(pins):
        try:
            papermill.execute_notebook(
                paths.notebooks() / f"{stem}.ipynb",
                out,
                parameters={"profile": profile, **dataclasses.asdict(parameters)},
                engine_name="paperlib",
                kernel_name="python3",
                cwd=paths.root(),
                progress_bar=False,
                execution_timeout=timeout,
                config=Config({"KernelManager": {"transport_encryption": "auto"}}),
            )
        except Exception as caught:  # whatever stopped it is told with the cell's source
            error = caught
    problem = _problem(out, error)
    if problem is None and not pending.is_dir():
        problem = "it did not call run.finish(), so no artifact was written"
    if problem is not None:
        shutil.rmtree(pending, ignore_errors=True)
        raise InputError(f"{stem} failed: {problem}\nexecuted notebook: {artifacts.relative(out)}")
    folder = artifacts.figures_folder(stem, profile, parameters)
    artifacts.commit_pending(pending, stem, folder)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Kernels inherit the environment of this process."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _problem(executed: Path, error: Exception | None) -> str | None:
    """What went wrong in an executed notebook; None when nothing did.

    papermill takes exit() for success: so every cell's own status is looked at.
    """
    import nbformat

    if not executed.is_file():
        return f"{error}"
    cells = nbformat.read(executed, as_version=4).cells
    code = [c for c in cells if c.cell_type == "code"]
    begun = [c for c in code if c.metadata.get("papermill", {}).get("start_time")]
    if error is not None:
        last = begun[-1] if begun else None
        lines = str(getattr(error, "evalue", error)).strip().splitlines()
        name = getattr(error, "ename", type(error).__name__)
        return _at(last, name, lines[-1] if lines else "")
    for cell in code:
        status = cell.metadata.get("papermill", {}).get("status")
        errors = [o for o in cell.outputs if o.output_type == "error"]
        if errors or status != "completed" or cell.execution_count is None:
            return _at(cell, "stopped early", errors[0].ename if errors else f"status {status}")
        for output in cell.outputs:
            if output.get("name") == "stderr":
                lines = [x for x in output.text.splitlines() if x.strip() and x[0] != " "]
                return _at(cell, "wrote to stderr", (lines or [output.text.strip()])[-1])
    return None


def _at(cell: Any, what: str, line: str) -> str:
    if cell is None:
        return f"{what}: {line}"
    source = "\n".join(f"    {s}" for s in cell.source.strip().splitlines())
    return f"{what}: {line}\n  in the cell\n{source}"


def save_outputs(stem: str) -> None:
    """Put the outputs of the executed ``full`` notebook into the one under notebooks/.

    The injected cell and papermill's metadata stay behind; execution counts are 1..N.
    """
    import nbformat

    path = paths.notebooks() / f"{stem}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    executed = nbformat.read(executed_path(stem, "full"), as_version=4)
    ran = [
        c
        for c in executed.cells
        if c.cell_type == "code" and "injected-parameters" not in c.metadata.get("tags", [])
    ]
    code = [c for c in notebook.cells if c.cell_type == "code"]
    for count, (cell, done) in enumerate(zip(code, ran, strict=True), 1):
        cell.outputs, cell.execution_count = done.outputs, count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    with files.replacing(path) as temporary:
        nbformat.write(notebook, temporary)


# all notebooks


class _TimeLeft(ProgressColumn):
    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self.text = text

    def render(self, task: Any) -> Text:
        return Text(self.text())


@dataclass
class _Report:
    """What doit tells while it runs, as lines and a bar with the time left."""

    console: Console
    expected: dict[str, float]  # stem -> seconds, of those that have to run
    done: dict[str, str] = field(default_factory=dict)  # stem -> made | up to date | failed
    began: float = 0.0
    current: str = ""
    bar: Progress | None = None

    def left(self) -> str:
        waiting = [s for s in self.expected if s not in self.done]
        seconds = sum(self.expected[s] for s in waiting)
        if self.current in waiting:
            seconds -= min(time.time() - self.began, self.expected[self.current])
        if seconds > 90:
            return f"about {round(seconds / 60)} min left"
        return "less than 2 min left" if seconds > 0 else "nearly done"

    def advance(self, done: int, cells: int) -> None:
        if self.bar is not None:
            before = sum(self.expected.get(s, 0.0) for s in self.done)
            completed = before + self.expected[self.current] * done / cells
            text = f"{self.current}, cell {done} of {cells}"
            self.bar.update(self.bar.task_ids[0], completed=completed, description=text)

    # the names below are doit's

    def initialize(self, tasks: Any, selected_tasks: Any) -> None:
        if self.console.is_terminal and self.expected:
            columns = (TextColumn("{task.description}"), BarColumn(), _TimeLeft(self.left))
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar.add_task("", total=sum(self.expected.values()))
            self.bar.start()

    def get_status(self, task: Any) -> None:
        pass

    def execute_task(self, task: Any) -> None:
        self.current, self.began = task.name, time.time()
        self.expected.setdefault(task.name, 0.0)
        number = sum(s in self.expected for s in self.done) + 1
        line = f"{number} of {len(self.expected)}: {task.name} runs, {self.left()}"
        self.console.print(line, highlight=False)

    def add_failure(self, task: Any, fail: Any) -> None:
        self.done[task.name] = "failed"
        self.console.print(fail.get_msg().rstrip(), markup=False, highlight=False, soft_wrap=True)

    def add_success(self, task: Any) -> None:
        self.done[task.name] = "made"

    def skip_uptodate(self, task: Any) -> None:
        self.done[task.name] = "up to date"

    def skip_ignore(self, task: Any) -> None:
        pass

    def cleanup_error(self, exception: Any) -> None:
        self.console.print(exception.get_msg(), markup=False)

    def runtime_error(self, msg: str) -> None:
        self.console.print(msg, markup=False)

    def teardown_task(self, task: Any) -> None:
        pass

    def complete_run(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def reproduce(
    profile: str,
    overrides: Sequence[str] = (),
    *,
    only: Sequence[str] = (),
    force: bool = False,
    keep_going: bool = False,
    remeasure: bool = False,
    save: bool = False,
    timeout: int = 6 * _HOUR,
    registry: Mapping[str, Artifact] = REGISTRY,
    console: Console | None = None,
) -> int:
    """Run every notebook that is not current, and say where each figure and table is.

    overrides: ``name=value``, for every notebook that has the parameter. only: stems or their
    numbers, with what they read. save: write the outputs of an unchanged ``full`` profile into
    notebooks/. Returns 0, or 1 when a notebook failed; InputError before any kernel starts.
    """
    from filelock import FileLock, Timeout

    console = console or Console()
    known = stems()
    chosen = _with_inputs([_stem_of(name, known) for name in only] or known)
    parameters = {s: profiles.resolve(s, profile, o) for s, o in _typed(overrides, chosen).items()}
    for stem in chosen:
        check_notebook(stem, registry)

    build = paths.build(profile)
    build.mkdir(parents=True, exist_ok=True)
    lock = FileLock(build / "reproduce.lock")  # released by the system when its holder dies
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another run of profile {profile} is in progress: wait for it, or end it"
        ) from None
    with lock:
        asked = time.time() if remeasure else 0.0
        return _run_all(
            *(profile, chosen, parameters, force or remeasure, keep_going, save, timeout, asked),
            *(registry, console),
        )


def _stem_of(name: str, known: Sequence[str]) -> str:
    """``01`` and ``notebooks/01_layer_entropy.ipynb`` mean 01_layer_entropy."""
    wanted = Path(name).name.removesuffix(".ipynb")
    matching = [s for s in known if wanted in (s, s.split("_")[0])]
    if len(matching) != 1:
        raise InputError(f"no notebook {name!r}: choose from {', '.join(known)}")
    return matching[0]


def _with_inputs(chosen: Sequence[str]) -> list[str]:
    found = set(chosen)
    for stem in chosen:
        found |= set(_with_inputs(AFTER.get(stem, ())))
    return sorted(found)


def _typed(overrides: Sequence[str], chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """For each notebook the overrides whose parameter it has; a name that none has is an error."""
    typed: dict[str, dict[str, Any]] = {stem: {} for stem in chosen}
    for text in overrides:
        owners = [s for s in chosen if text.partition("=")[0] in profiles.fields(s)]
        for stem in owners or chosen[:1]:  # without an owner, the first one words the error
            name, value = profiles.parse_override(text, stem)
            typed[stem][name] = value
    return typed


def _run_all(
    profile: str,
    chosen: Sequence[str],
    parameters: Mapping[str, Any],
    force: bool,
    keep_going: bool,
    save: bool,
    timeout: int,
    remeasure: float,
    registry: Mapping[str, Artifact],
    console: Console,
) -> int:
    from doit.cmd_base import TaskLoader2
    from doit.doit_cmd import DoitMain
    from doit.exceptions import TaskFailed
    from doit.task import dict_to_task

    build = paths.build(profile)
    times = artifacts.read_json(build / "seconds.json")  # how long each took here, last time
    waiting = [s for s in chosen if force or _reasons(s, profile, parameters[s], registry)]
    guess = {s: times.get(s, _GUESS.get(profile, 60.0)) for s in chosen}
    report = _Report(console, {s: guess[s] for s in waiting})

    def execute(stem: str) -> Any:
        for reason in _reasons(stem, profile, parameters[stem], registry):
            console.print(f"  {reason}", markup=False, highlight=False)
        began = time.time()
        try:
            run_notebook(
                *(stem, profile, parameters[stem]),
                remeasure=remeasure,
                timeout=timeout,
                on_cell=report.advance,
            )
            if save and artifacts.is_published(stem, profile, parameters[stem]):
                save_outputs(stem)
        except InputError as error:
            return TaskFailed(str(error))
        times[stem] = round(time.time() - began, 1)
        files.write_json(build / "seconds.json", times)
        return True

    def is_current(stem: str) -> bool:
        return not _reasons(stem, profile, parameters[stem], registry)

    class Loader(TaskLoader2):
        def load_doit_config(self) -> dict[str, Any]:
            return {
                "dep_file": str(build / "doit.db"),
                "backend": "sqlite3",
                "reporter": report,
                "continue": keep_going,
                "always": force,
            }

        def load_tasks(self, cmd: Any, pos_args: Any) -> list[Any]:
            return [
                dict_to_task(
                    {
                        "name": stem,
                        "actions": [(execute, [stem])],
                        "uptodate": [(is_current, [stem])],
                        "task_dep": [s for s in AFTER.get(stem, ()) if s in chosen],
                        "io": {"capture": False},
                    }
                )
                for stem in chosen
            ]

    code = DoitMain(Loader(), config_filenames=()).run(["run"])
    _say_where(profile, chosen, parameters, report, registry, console)
    return 1 if code else 0


def _reasons(
    stem: str, profile: str, parameters: Any, registry: Mapping[str, Artifact]
) -> list[str]:
    return artifacts.outdated(stem, profile, parameters, registry)


def _say_where(
    profile: str,
    chosen: Sequence[str],
    parameters: Mapping[str, Any],
    report: _Report,
    registry: Mapping[str, Artifact],
    console: Console,
) -> None:
    """Where each figure and table is, for those that were made or are current."""
    count = 0
    for stem in chosen:
        state = report.done.get(stem, "not run")
        console.print(f"{stem}: {state}", highlight=False)
        if state not in ("made", "up to date"):
            continue
        folder = artifacts.figures_folder(stem, profile, parameters[stem])
        entries = artifacts.read_manifest(folder)
        for id in artifacts.declared(stem, registry):
            count += 1
            names = [f["path"] for f in entries[id]["files"]]
            suffixes = " ".join(n.removeprefix(id) for n in names)
            place = artifacts.relative(folder / id)
            console.print(f"  {place}  {suffixes}", highlight=False, markup=False, soft_wrap=True)
    if chosen and all(report.done.get(s) == "up to date" for s in chosen):
        console.print(f"nothing to do: all {count} figures and tables are current", highlight=False)
