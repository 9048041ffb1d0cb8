"""What readers ask of a figure or table: is it intact, where does it come from, how to cite it."""

import io
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paperlib import __version__, artifacts, files, paths, provenance
from paperlib.artifacts import REGISTRY, Artifact
from paperlib.errors import InputError

RTOL, ATOL = 1e-6, 1e-9  # for numbers from another environment


# verify


def verify(
    profile: str = "full",
    against: str | None = None,
    registry: Mapping[str, Artifact] = REGISTRY,
) -> tuple[list[str], list[str]]:
    """(problems, notes) of a folder of figures; intact when there are no problems.

    Every declared artifact of the notebooks at hand is recorded and the reverse; every file and
    every measured file has the sha256 of its record; nothing else lies in the folder. ``against``
    is a second folder of figures, or a git revision: then each artifact is compared with the one
    there, byte for byte when both come from the pinned packages on one platform, otherwise CSV
    files to a relative 1e-6. Notes say what was made from code or parameters of another day.
    """
    folder = paths.figures(profile)
    entries = artifacts.read_manifest(folder)
    shown = artifacts.relative(folder)
    if not entries:
        how = f"run paperlib reproduce --profile {profile}"
        return [f"{shown}/manifest.json is missing or empty: {how}"], []
    problems, notes = [], []
    present = {p.stem for p in paths.notebooks().glob("*.ipynb")}
    expected = {a.id for a in registry.values() if a.notebook in present}
    problems += [
        f"{i} is declared, but not in the manifest" for i in sorted(expected - set(entries))
    ]
    problems += [f"{i} is in the manifest, but not declared" for i in entries if i not in registry]
    recorded = {"manifest.json"}
    for id, entry in entries.items():
        for record in entry["files"]:
            recorded.add(record["path"])
            problems += _check_file(folder / record["path"], record["sha256"])
        for used in entry["data"]:
            path = paths.root() / used["path"]
            if used["outside"] or (profile != "full" and not path.exists()):
                notes.append(f"{id}: {used['path']} is not at hand")
            else:
                problems += _check_file(path, used["sha256"])
        notes += [f"{id}: {change}" for change in artifacts.changes(entry)]
    for path in sorted(folder.iterdir()):
        if path.name not in recorded and not path.name.startswith("."):
            problems.append(f"{shown}/{path.name} is in no record of the manifest")
    if against is not None:
        problems += _compare(folder, entries, _reader(against, folder), against)
    return list(dict.fromkeys(problems)), list(dict.fromkeys(notes))


def _check_file(path: Path, sha256: str) -> list[str]:
    shown = artifacts.relative(path)
    if not path.is_file():
        return [f"{shown} is missing"]
    return [] if files.sha256(path) == sha256 else [f"{shown} differs from its record (sha256)"]


def _reader(against: str, folder: Path) -> Callable[[str], bytes | None]:
    """Reads a file by name from another folder of figures or from a git revision of this one."""
    other = Path(against)
    if other.is_dir():
        return lambda name: (other / name).read_bytes() if (other / name).is_file() else None

    def show(name: str) -> bytes | None:
        what = f"{against}:{artifacts.relative(folder)}/{name}"
        done = subprocess.run(
            ["git", "-C", str(paths.root()), "show", what], capture_output=True, check=False
        )
        return done.stdout if done.returncode == 0 else None

    return show


def _compare(
    folder: Path, entries: dict[str, Any], read: Callable[[str], bytes | None], against: str
) -> list[str]:
    manifest = read("manifest.json")
    if manifest is None:
        raise InputError(f"no manifest.json in {against!r}: give a folder of figures or a revision")
    others = json.loads(manifest)["artifacts"]
    problems = [f"{i} is not in {against}" for i in entries if i not in others]
    problems += [f"{i} is only in {against}" for i in others if i not in entries]
    for id in entries.keys() & others.keys():
        exact = is_same_environment(entries[id], others[id])
        for record in entries[id]["files"]:
            name = record["path"]
            theirs = read(name)
            ours = (folder / name).read_bytes() if (folder / name).is_file() else b""
            if theirs is None:
                problems.append(f"{name} is not in {against}")
            elif ours != theirs and exact:
                problems.append(f"{name} differs from {against} in the same environment")
            elif ours != theirs and name.endswith(".csv") and not is_close(ours, theirs):
                problems.append(f"{name} differs from {against} by more than {RTOL:g} relative")
    return sorted(problems)


def is_same_environment(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Pinned packages on one platform: there, equal means equal bytes."""
    both = [e["volatile"]["environment"] for e in (ours, theirs)]
    return (
        ours["constraints"] == theirs["constraints"]
        and all(e["pinned"] for e in both)
        and both[0]["platform"] == both[1]["platform"]
        and both[0]["device"] == both[1]["device"]
    )


def is_close(ours: bytes, theirs: bytes) -> bool:
    """Whether two CSV files have the same columns and text, and numbers within tolerance."""
    import pandas as pd

    try:
        frames = [pd.read_csv(io.BytesIO(content)) for content in (ours, theirs)]
        pd.testing.assert_frame_equal(*frames, rtol=RTOL, atol=ATOL, check_dtype=False)
    except (AssertionError, ValueError):
        return False
    return True


# why and cite


def _entry(id: str, profile: str) -> dict[str, Any]:
    folder = paths.figures(profile)
    entries = artifacts.read_manifest(folder)
    if id not in entries:
        known = ", ".join(sorted(entries)) or f"nothing: run paperlib reproduce --profile {profile}"
        raise InputError(f"no {id!r} in {artifacts.relative(folder)}: there is {known}")
    return entries[id]


def content_hash(entry: dict[str, Any]) -> str:
    """64 hexadecimal digits that stand for all files of the artifact."""
    import hashlib

    names = {f["path"]: f["sha256"] for f in entry["files"]}
    return hashlib.sha256(files.canonical(names).encode()).hexdigest()


def command(entry: dict[str, Any]) -> str:
    """The command that makes the artifact again."""
    from paperlib import profiles

    stem, profile = entry["notebook"]["stem"], entry["profile"]
    words = ["paperlib reproduce", f"--profile {profile}", f"--only {stem.split('_')[0]}"]
    usual = profiles.resolve(stem, profile)
    for name, value in entry["parameters"].items():
        if getattr(usual, name, None) != value:
            words.append(f"-p {name}={value}")
    return " ".join([*words, "--force"])


def why(id: str, profile: str = "full", registry: Mapping[str, Artifact] = REGISTRY) -> str:
    """The whole chain behind an artifact, for a reader: files, notebook, parameters, data, code."""
    entry = _entry(id, profile)
    volatile = entry["volatile"]
    environment = volatile["environment"]
    lines = [f"{id}: {entry['title']}", f"  {entry['caption']}"]
    if id in registry:
        lines.append(f"  refuted by: {registry[id].refuted_by}")
    lines += ["files"]
    lines += [f"  {f['path']}  sha256 {f['sha256']}  {f['bytes']} bytes" for f in entry["files"]]
    lines += ["made by", f"  {command(entry)}"]
    lines += [f"  {entry['notebook']['path']}  code cells sha256 {entry['notebook']['sha256']}"]
    lines += [f"parameters ({entry['profile']} profile)"]
    lines += [f"  {name} = {value}" for name, value in entry["parameters"].items()]
    lines += ["data"] if entry["data"] else ["data: none"]
    for used in entry["data"]:
        lines.append(f"  {used['path']}  sha256 {used['sha256']}")
        lines += [f"    {line}" for line in _measured_by(paths.root() / used["path"])]
    if entry["inputs"]:
        lines.append(f"  artifacts read: {', '.join(entry['inputs'])}")
    lines += [f"code: paperlib {entry['version']}, tree {entry['tree']}"]
    lines += [f"  {name}  {hash}" for name, hash in entry["modules"].items()]
    packages = ", ".join(f"{n} {v}" for n, v in environment["packages"].items() if v)
    pinned = "pinned packages" if environment["pinned"] else "packages other than the pinned ones"
    lines += [
        "environment",
        f"  constraints.txt sha256 {entry['constraints'] or 'none'}; {pinned}",
        f"  Python {environment['python']}, {packages}",
        f"  {environment['platform']}, {environment['device']}, {environment['threads']} threads",
        f"  {volatile['created']}, {volatile['seconds']} s",
        f"  commit {volatile['commit'] or 'unknown'}",
    ]
    changes = artifacts.changes(entry)
    lines += ["since then"] + [f"  {c}" for c in changes] if changes else ["nothing changed since"]
    return "\n".join(lines)


def _measured_by(result: Path) -> list[str]:
    """Where a measured file comes from, and whether today's code is still that code."""
    record = artifacts.read_record(result)
    if record is None:
        return []
    seconds, device = record["seconds"], record["environment"]["device"]
    lines = [f"measured {record['created']} in {seconds} s on {device}"]
    lines.append(f"key {files.canonical(record['key'])}")
    then = record["code"]
    now = provenance.modules(name for name in then if name.startswith("paperlib"))
    changed = [m for m in then if m in now and now[m] != then[m]]
    if changed:
        lines.append(f"today's code differs: {', '.join(changed)}; --remeasure measures again")
    else:
        lines.append("today's code is the code that measured it")
    return lines


def _citation() -> dict[str, Any]:
    import yaml

    path = paths.root() / "CITATION.cff"
    if not path.is_file():
        raise InputError(f"no CITATION.cff in {paths.root()}: it holds authors and title")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def cite(id: str, profile: str = "full") -> str:
    """One line and a BibTeX entry, with version and content hash."""
    entry = _entry(id, profile)
    citation = _citation()
    names = [
        author.get("name") or f"{author['given-names']} {author['family-names']}"
        for author in citation["authors"]
    ]
    year = str(entry["volatile"]["created"])[:4]
    sha256 = content_hash(entry)
    mark = "" if entry["profile"] == "full" else f" ({entry['profile']} profile, not for citing)"
    line = (
        f"{', '.join(names)} ({year}). {entry['title']} [{entry['kind']} {id}]{mark}. In: "
        f"{citation['title']}, version {entry['version']}. sha256:{sha256}"
    )
    fields = {
        "author": " and ".join(f"{{{_bibtex(name)}}}" for name in names),
        "title": f"{{{_bibtex(entry['title'])}}}",
        "year": year,
        "version": entry["version"],
        "howpublished": f"{_bibtex(citation['title'])}, {entry['kind']} {id}",
        "note": f"{mark.strip() + ' ' if mark else ''}sha256:{sha256}",
    }
    if citation.get("repository-code"):
        fields["url"] = citation["repository-code"]
    body = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
    return f"{line}\n\n@misc{{paperlib-{id},\n{body}\n}}"


def _bibtex(text: str) -> str:
    return re.sub(r"([&%#_$])", r"\\\1", text)


# gallery

_START, _END = "<!-- gallery: start -->", "<!-- gallery: end -->"


def gallery(registry: Mapping[str, Artifact] = REGISTRY) -> str:
    """The README's table of figures and tables, from the registry."""
    present = {p.stem for p in paths.notebooks().glob("*.ipynb")}
    rows = ["| id | | what it shows | made by |", "| --- | --- | --- | --- |"]
    for a in registry.values():
        if a.notebook not in present:
            continue
        alt = a.alt.replace('"', "'")
        image = f'<img src="figures/{a.id}.png" alt="{alt}" width="240">'
        link = (
            f"[{a.id}](figures/{a.id}.pdf)"
            if a.kind == "figure"
            else f"[{a.id}](figures/{a.id}.md)"
        )
        text = f"**{a.title}.** {a.caption} *Refuted by:* {a.refuted_by}".replace("|", "\\|")
        made = f"[{a.notebook}](notebooks/{a.notebook}.ipynb)"
        made += f"<br>`paperlib reproduce --only {a.notebook.split('_')[0]}`"
        rows.append(f"| {link} | {image if a.kind == 'figure' else ''} | {text} | {made} |")
    return "\n".join(rows)


def readme_with_gallery(readme: Path, registry: Mapping[str, Artifact] = REGISTRY) -> str:
    """The README's text with a current gallery between its two markers."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if text.count(_START) != 1 or text.count(_END) != 1:
        raise InputError(
            f"{readme.name} has no place for the gallery: add the lines {_START} and {_END}"
        )
    before, rest = text.split(_START)
    return f"{before}{_START}\n{gallery(registry)}\n{_END}{rest.split(_END)[1]}"


# crate


def crate(out: Path, profile: str = "full", registry: Mapping[str, Artifact] = REGISTRY) -> Path:
    """Write an RO-Crate: figures, data and notebooks, and the action that made each artifact."""
    try:
        from rocrate.rocrate import ROCrate
    except ImportError:
        raise InputError(
            "the package rocrate is not installed: python -m pip install 'paperlib[crate]'"
        ) from None

    folder = paths.figures(profile)
    entries = artifacts.read_manifest(folder)
    if not entries:
        raise InputError(
            f"no artifacts of profile {profile}: run paperlib reproduce --profile {profile}"
        )
    citation = _citation()
    built = ROCrate()
    built.name, built.description = citation["title"], citation.get("abstract", citation["title"])
    built.license = citation.get("license")
    built.add_file(folder / "manifest.json", "figures/manifest.json")
    for id, entry in sorted(entries.items()):
        notebook_path = paths.root() / entry["notebook"]["path"]
        types = ["File", "SoftwareSourceCode"]
        instrument = built.add_file(
            notebook_path,
            entry["notebook"]["path"],
            properties={"@type": types, "name": entry["notebook"]["stem"]},
        )
        used = [
            built.add_file(paths.root() / u["path"], u["path"], properties={"sha256": u["sha256"]})
            for u in entry["data"]
            if (paths.root() / u["path"]).is_file() and not u["outside"]
        ]
        made = [
            built.add_file(
                folder / f["path"],
                f"figures/{f['path']}",
                properties={
                    "name": f"{entry['title']} ({f['path']})",
                    "description": entry["caption"],
                    "sha256": f["sha256"],
                },
            )
            for f in entry["files"]
        ]
        action = built.add_action(
            instrument,
            identifier=f"#make-{id}",
            object=used,
            result=made,
            properties={"name": command(entry), "endTime": entry["volatile"]["created"]},
        )
        action["agent"] = {"@id": "#paperlib"}
    from rocrate.model.contextentity import ContextEntity

    software = {"@type": "SoftwareApplication", "name": "paperlib", "version": __version__}
    built.add(ContextEntity(built, "#paperlib", properties=software))
    built.write(out)
    return out
