"""What code a result depends on, and where it was made: hashes that comments do not change."""

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from paperlib import files, paths

PACKAGE = Path(__file__).resolve().parent
_STYLE = "paper.mplstyle"


# code


def code_cells(notebook: Path) -> list[str]:
    """Sources of the code cells; outputs, markdown and metadata play no part."""
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def notebook_hash(notebook: Path) -> str:
    """sha256 of the code cells, "" when there is no such file."""
    if not Path(notebook).is_file():
        return ""
    return hashlib.sha256(files.canonical(code_cells(notebook)).encode()).hexdigest()


def parse_cell(source: str) -> ast.Module:
    """The syntax tree of a cell without its magics (lines that begin with % or !)."""
    return ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", source))


def imported(tree: ast.AST, module: str = "") -> set[str]:
    """Names under paperlib that the code imports, at any depth; relative to ``module``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] == "paperlib"}


def module_file(name: str) -> Path | None:
    """The file of ``paperlib.x.y``; None for what is a name inside a module."""
    if not name:
        return None
    path = PACKAGE.joinpath(*name.split(".")[1:])
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((c for c in candidates if c.is_file()), None)


def modules(roots: Iterable[str]) -> dict[str, str]:
    """Every paperlib module that ``roots`` import, directly or not -> hash of its code.

    The hash is of the normalised syntax tree: comments, docstrings and layout do not enter. Nor do
    profiles and the registry of artifacts: each notebook's own part of them is compared by value.
    """
    waiting, found = [name for name in roots], {}
    while waiting:
        name = waiting.pop()
        path = module_file(name)
        if name in found or path is None:
            continue
        # as a package, so that a relative import in an __init__ resolves too
        own = f"{name}.__init__" if path.name == "__init__.py" else name
        found[name], names = _parsed(path, own, path.stat().st_mtime_ns)
        waiting += [*names, name.rpartition(".")[0]]
    found.pop("paperlib.profiles", None)
    if found:
        found[_STYLE] = files.sha256(PACKAGE / _STYLE)[:16] if (PACKAGE / _STYLE).is_file() else ""
    return dict(sorted(found.items()))


@cache
def _parsed(path: Path, name: str, mtime: int) -> tuple[str, frozenset[str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = frozenset(imported(tree, name))
    if name == "paperlib.artifacts":
        tree.body = [
            n for n in tree.body if getattr(getattr(n, "target", 0), "id", "") != "REGISTRY"
        ]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16], names


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def notebook_modules(notebook: Path) -> dict[str, str]:
    """The modules that a notebook imports, transitively -> hash."""
    if not Path(notebook).is_file():
        return {}
    return modules(set().union(*(imported(parse_cell(c)) for c in code_cells(notebook))))


# environment


def constraints_hash() -> str:
    path = paths.root() / "constraints.txt"
    return files.sha256(path) if path.is_file() else ""


def is_pinned() -> bool:
    """Whether every installed package that constraints.txt names has the version it pins."""
    path = paths.root() / "constraints.txt"
    if not path.is_file():
        return False
    for line in path.read_text().splitlines():
        name, _, pin = line.partition("#")[0].strip().partition("==")
        if not pin:
            continue
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.split("+")[0] != pin:  # +cpu and +cu130 are builds of one version
            return False
    return True


def environment() -> dict[str, Any]:
    """Facts about the machine that may change the last digits, and none that name it."""
    packages = {}
    for name in ("matplotlib", "numpy", "pandas", "scipy", "torch", "transformers"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = ""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "device": torch.cuda.get_device_name() if torch is not None and cuda else "cpu",
        "threads": torch.get_num_threads() if torch is not None else os.cpu_count(),
        "packages": packages,
        "pinned": is_pinned(),
    }


def git_commit() -> str:
    """The commit that is checked out, with ``+`` when files differ from it; "" outside git."""
    try:
        git = ["git", "-C", str(paths.root())]
        run = {"capture_output": True, "text": True, "check": True, "timeout": 20}
        head = subprocess.run([*git, "rev-parse", "HEAD"], **run).stdout.strip()  # type: ignore[call-overload]
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], **run).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+" if dirty else "")
