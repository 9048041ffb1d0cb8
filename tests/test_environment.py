"""environment.yml, pyproject.toml, constraints.txt and the Makefile speak of one environment."""

import itertools
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        name_of(line): line.partition("==")[2]
        for line in lines
        if line.strip() and not line.startswith("#")
    }


def test_conda_environment_installs_this_package_with_its_constraints() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    python = next(d for d in plain if d.startswith("python="))
    low = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, python.removeprefix("python=").split("."))) >= low
    assert "-c constraints.txt" in pip
    (own,) = [line for line in pip if line.startswith("-e .")]
    extras = set(re.search(r"\[(.*)\]", own).group(1).split(","))  # type: ignore[union-attr]
    assert extras <= set(PROJECT["optional-dependencies"])
    assert f"'.[{','.join(sorted(extras, reverse=True))}]'" in (ROOT / "Makefile").read_text()
    assert "defaults" not in environment["channels"]


def test_every_dependency_is_pinned_within_its_range() -> None:
    from packaging.specifiers import SpecifierSet

    pinned = pins()
    every = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    for requirement in every:
        name = name_of(requirement)
        assert name in pinned, f"{name} is not in constraints.txt"
        allowed = SpecifierSet(requirement[len(name) :])
        assert pinned[name] in allowed, f"{requirement}: pinned {pinned[name]}"


def test_data_carriers_are_the_ones_that_the_code_names() -> None:
    from paperlib.corpora import SETS
    from paperlib.targets import CARRIER

    lines = (ROOT / "requirements-data.txt").read_text().splitlines()
    carriers = {line for line in lines if line and not line.startswith("#")}
    assert carriers == {CARRIER, *(s.carrier for s in SETS.values())}


def test_one_version() -> None:
    from paperlib import __version__

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert __version__ == PROJECT["version"] == citation["version"]
