"""The command line: paperlib reproduce | verify | why | cite | gallery | crate | select."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from paperlib import __version__
from paperlib.errors import InputError

app = typer.Typer(
    help="Which hidden layers of an LLM should feed a speculative-decoding draft head, and why.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Profile = Annotated[str, typer.Option(help="smoke (minutes), quick (under half an hour) or full.")]
Id = Annotated[str, typer.Argument(help="An artifact's id, for example fig-cka-map.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paperlib {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...


# the paper: figures and tables


@app.command()
def reproduce(
    profile: Profile = "quick",
    target: Annotated[
        str, typer.Option(help="Target model: smollm2-135m, a hub id, a folder, a .gguf file.")
    ] = "",
    corpus: Annotated[str, typer.Option(help="Named sets or files, comma-separated.")] = "",
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", help="name=value, typed by the profile; repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A notebook, by stem or number; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run what is current, too.")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on with the others after a failure.")
    ] = False,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure again; full renews data/full.")
    ] = False,
    save_outputs: Annotated[
        bool, typer.Option("--save-outputs", help="Write full's outputs into notebooks/.")
    ] = False,
    timeout: Annotated[int, typer.Option(help="Seconds that one cell may take.")] = 6 * 3600,
) -> None:
    """Make every figure and table that is not current, and say where each one is."""
    from paperlib import pipeline

    given = [*(parameter or [])]
    given += [
        f"{name}={value}" for name, value in (("target", target), ("corpus", corpus)) if value
    ]
    code = pipeline.reproduce(
        profile,
        given,
        only=only or [],
        force=force,
        keep_going=keep_going,
        remeasure=remeasure,
        save=save_outputs,
        timeout=timeout,
    )
    raise typer.Exit(code)


@app.command()
def verify(
    profile: Profile = "full",
    against: Annotated[
        str | None, typer.Option(help="A second folder of figures, or a git revision.")
    ] = None,
) -> None:
    """Check every figure, table and measured file against its record; exit 1 on any mismatch."""
    from paperlib import published

    problems, notes = published.verify(profile, against)
    for note in notes:
        print(f"note: {note}")
    for problem in problems:
        print(f"mismatch: {problem}")
    if not problems:
        print("intact: every file is what the manifest says")
    raise typer.Exit(1 if problems else 0)


@app.command()
def why(id: Id, profile: Profile = "full") -> None:
    """Say how a figure or table was made: notebook, parameters, data, code, hashes, command."""
    from paperlib import published

    print(published.why(id, profile))


@app.command()
def cite(id: Id, profile: Profile = "full") -> None:
    """Print a line and a BibTeX entry with version and content hash."""
    from paperlib import published

    print(published.cite(id, profile))


@app.command()
def gallery(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 when it is not current.")
    ] = False,
) -> None:
    """Renew the README's table of figures."""
    from paperlib import files, paths, published

    readme = paths.root() / "README.md"
    text = published.readme_with_gallery(readme)
    if text == readme.read_text(encoding="utf-8"):
        print("the gallery is current")
    elif check:
        print("the gallery in README.md is not current: run paperlib gallery")
        raise typer.Exit(1)
    else:
        with files.replacing(readme) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print("README.md renewed")


@app.command()
def crate(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("build/crate"),
    profile: Profile = "full",
) -> None:
    """Write figures, data, notebooks and how they hang together as an RO-Crate."""
    from paperlib import published

    print(f"written: {published.crate(out, profile)}")


# layers: select


@app.command()
def select(
    model: Annotated[
        str, typer.Argument(help="smollm2-135m, a hub id, a model folder or a .gguf file.")
    ],
    texts: Annotated[
        str, typer.Option(help="A .jsonl or .txt file of your own, or a folder of .txt files.")
    ] = "",
    corpus: Annotated[
        str, typer.Option(help="Named sets, comma-separated.")
    ] = "openwebtext,wikipedia",
    k: Annotated[int, typer.Option("-k", help="How many boundaries, 1 to 6.")] = 3,
    method: Annotated[
        str, typer.Option(help="s2, entropy, cka, mrmr-difference, dpp, loes, ... (see README).")
    ] = "s2",
    keep: Annotated[
        float, typer.Option(help="Share of tokens, of highest predictive entropy, that count.")
    ] = 0.5,
    min_gap: Annotated[int, typer.Option(help="Least distance between boundaries.")] = 1,
    documents: Annotated[int, typer.Option(help="Documents to read.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each document.")] = 128,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples of documents.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the sample and the bootstrap.")] = 0,
    engine: Annotated[
        str | None, typer.Option(help="Print the ids of this engine only, e.g. vllm.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the JSON record goes [selection-MODEL.json].")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="A new folder for the CKA map and the landscape.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record.")] = False,
) -> None:
    """Choose the layers that feed a draft head, and print their ids for every engine."""
    from paperlib import files
    from paperlib.boundaries import ENGINES
    from paperlib.profiles import Sample
    from paperlib.recommend import recommend, summary

    if engine is not None and engine not in ENGINES:
        raise InputError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    if report is not None and report.exists():
        raise InputError(f"{report} exists already: name a new folder for the report")
    for name, value, low in (("documents", documents, 2), ("max-tokens", max_tokens, 2)):
        if value < low:
            raise InputError(f"--{name} {value} must be at least {low}")
    if resamples < 1:
        raise InputError(f"--resamples {resamples} must be at least 1: stability needs a bootstrap")
    sample = Sample(
        target=model,
        corpus=texts or corpus,
        documents=documents,
        max_tokens=max_tokens,
        resamples=resamples,
        seed=seed,
    )
    record = recommend(sample, k=k, method=method, keep=keep, min_gap=min_gap, report=report)
    slug = Path(model).name.replace(".gguf", "") or "model"
    place = out or Path(f"selection-{slug}.json")
    files.write_json(place, record)
    print(files.canonical(record) if as_json else summary(record, engine))
    if not as_json:
        print(f"  record: {place}")


# heads: generate, train, evaluate, export


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2."""
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
