"""Guards on notebooks, rules and figures: each returns what is wrong, [] when nothing is.

Kept apart from paperlib, and called both on this repository (test_notebook_guards) and on
notebooks that were broken on purpose (test_sabotage).
"""

import ast
import hashlib
import json
import re
from pathlib import Path
from typing import Any

LARGEST = 300_000  # bytes
LONGEST = 5  # lines of a function defined in a notebook
HOME = re.compile(r"(/(home|Users|root)/|[A-Z]:\\\\Users)[\w.-]*")


def read(path: Path) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [c for c in read(path)["cells"] if c["cell_type"] == "code"]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in code_cells(path) for output in cell["outputs"]]


def tree(cell: dict[str, Any]) -> ast.Module:
    return ast.parse("".join(cell["source"]))


def execution_counts(path: Path) -> list[str]:
    """Executed once, top to bottom. nbval does not compare a cell that was never executed."""
    counts = [c["execution_count"] for c in code_cells(path)]
    wanted = list(range(1, 1 + len(counts)))
    return [] if counts == wanted and counts else [f"execution counts {counts}, not {wanted}"]


def errors(path: Path) -> list[str]:
    return [f"error output {o['ename']}" for o in outputs(path) if o["output_type"] == "error"]


def stderr(path: Path) -> list[str]:
    return [f"stderr: {''.join(o['text'])}" for o in outputs(path) if o.get("name") == "stderr"]


def injected(path: Path) -> list[str]:
    """Nothing that a runner adds: nbval would execute an injected cell, too."""
    tags = [t for c in code_cells(path) for t in c["metadata"].get("tags", [])]
    found = [f"cell tagged {t}" for t in tags if t != "parameters"]
    notebook = read(path)
    metadata = [notebook["metadata"], *(c["metadata"] for c in notebook["cells"])]
    found += [f"metadata {k}" for m in metadata for k in ("papermill", "execution") if k in m]
    return found


def machine_paths(path: Path) -> list[str]:
    text = Path(path).read_text(encoding="utf-8")
    here = [str(Path.home()), str(Path(__file__).resolve().parent.parent)]
    found = [match[0] for match in HOME.finditer(text)]
    return [f"path of a machine: {p}" for p in [*found, *(h for h in here if h in text)]]


def size(path: Path) -> list[str]:
    n = Path(path).stat().st_size
    return [] if n <= LARGEST else [f"{n} bytes, more than {LARGEST}"]


def kernel(path: Path) -> list[str]:
    """The one kernel that pip puts into every environment, and no version of Python."""
    metadata = read(path)["metadata"]
    wanted = {"name": "python3", "display_name": "Python 3", "language": "python"}
    found = [] if metadata.get("kernelspec") == wanted else [f"kernel {metadata.get('kernelspec')}"]
    language = metadata.get("language_info")
    return found + ([] if language == {"name": "python"} else [f"language {language}"])


def figures_shown(path: Path) -> list[str]:
    """A cell that makes a figure shows it as PNG; SVG differs from run to run."""
    found = []
    for i, cell in enumerate(code_cells(path), 1):
        calls = [n for n in ast.walk(tree(cell)) if isinstance(n, ast.Call)]
        made = sum(getattr(c.func, "attr", "") == "figure" for c in calls)
        data = [o.get("data", {}) for o in cell["outputs"]]
        if sum("image/png" in d for d in data) < made:
            found.append(f"cell {i} makes a figure and shows none")
        if any("image/svg+xml" in d for d in data):
            found.append(f"cell {i} shows an SVG")
    return found


def imports(path: Path) -> list[str]:
    found = []
    for cell in code_cells(path):
        for node in ast.walk(tree(cell)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            found += [f"imports {n}" for n in names if n.split(".")[0] != "paperlib"]
    return found


def functions(path: Path) -> list[str]:
    nodes = [n for cell in code_cells(path) for n in ast.walk(tree(cell))]
    defined = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return [
        f"{n.name} has {n.end_lineno - n.lineno + 1} lines"
        for n in defined
        if n.end_lineno - n.lineno + 1 > LONGEST
    ]


def unchecked(path: Path) -> list[str]:
    """No cell is taken out of the comparison of outputs."""
    text = "\n".join("".join(c["source"]) for c in code_cells(path)).upper()
    marks = ("NBVAL_SKIP", "NBVAL_IGNORE_OUTPUT", "NBVAL_RAISES", "PYTEST_VALIDATE_IGNORE")
    return [f"{mark} in a cell" for mark in marks if mark in text]


NOTEBOOK = (
    *(execution_counts, errors, stderr, injected, machine_paths, size, kernel, figures_shown),
    *(imports, functions, unchecked),
)


def sanitize_rules(text: str) -> list[str]:
    """nbval drops malformed rules silently: every rule begun must be one that nbval reads."""
    from nbval.plugin import get_sanitize_patterns

    parsed = get_sanitize_patterns(text)
    begun = [line for line in text.splitlines() if re.match(r"\s*regex\b", line, re.I)]
    ended = [line for line in text.splitlines() if re.match(r"\s*replace\b", line, re.I)]
    found = []
    if not len(parsed) == len(begun) == len(ended):
        found.append(f"{len(begun)} rules begun, {len(ended)} ended, {len(parsed)} read by nbval")
    for regex, _ in parsed:
        try:
            if re.compile(regex).match(""):
                found.append(f"{regex!r} matches nothing at all, so everywhere")
        except re.error as error:
            found.append(f"{regex!r} is no regular expression: {error}")
    return found


def manifest(figures: Path, declared: set[str]) -> list[str]:
    """Every file is in the manifest and the reverse, with its hash; every id is declared."""
    entries = read(figures / "manifest.json")["artifacts"]
    recorded = {f["path"]: f["sha256"] for e in entries.values() for f in e["files"]}
    present = {p.name: p for p in figures.iterdir() if p.name != "manifest.json"}
    found = [f"{name} is not in the manifest" for name in present.keys() - recorded.keys()]
    found += [f"{name} is missing" for name in recorded.keys() - present.keys()]
    found += [f"{i} is declared and not made" for i in declared - entries.keys()]
    found += [f"{i} is made and not declared" for i in entries.keys() - declared]
    found += [
        f"{i} is of profile {e['profile']}" for i, e in entries.items() if e["profile"] != "full"
    ]
    for name in present.keys() & recorded.keys():
        if hashlib.sha256(present[name].read_bytes()).hexdigest() != recorded[name]:
            found.append(f"{name} differs from the manifest")
    return sorted(found)
