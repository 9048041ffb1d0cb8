"""Captured states against plain forwards; padding, resuming, and files that are refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from paperlib.capture import capture_states, open_states, predictive_entropy
from paperlib.corpora import Document
from paperlib.errors import InputError
from paperlib.targets import load_target
from tests.tiny import FAMILIES, VOCAB, tiny_target_folder

LENGTHS = (3, 40, 11, 2, 27, 8)


def documents(lengths=LENGTHS, seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [
        Document(f"doc/{i}", rng.integers(5, VOCAB, n).tolist(), [j == 0 for j in range(n)])
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(tiny_target_folder(tmp_path_factory.mktemp("m") / "llama", "llama")))


def capture(target, out: Path, **options):
    return capture_states(target, documents(), out, progress=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_residual_stream_at_every_boundary(family, tmp_path) -> None:
    """b < N as in transformers' hidden_states; b = N before the final norm, unlike it."""
    target = load_target(str(tiny_target_folder(tmp_path / family, family)))
    found = capture(target, tmp_path / "states")
    assert found.boundaries == (0, 1, 2, 3, 4)
    start = 0
    for document in documents():
        stop = start + len(document.input_ids)
        with torch.inference_mode():
            plain = target.model(
                torch.tensor([document.input_ids]), output_hidden_states=True, use_cache=False
            )
            for b in range(4):
                torch.testing.assert_close(
                    found.states[b, start:stop], plain.hidden_states[b][0], rtol=1e-5, atol=1e-5
                )
            last = found.states[4, start:stop]
            normed = plain.hidden_states[4][0]
            assert (last - normed).abs().max() > 0.05  # pre-norm, not what transformers returns
            torch.testing.assert_close(target.final_norm(last), normed, rtol=1e-4, atol=1e-5)
        start = stop


def test_torchspec_87_logits_from_the_captured_last_state(target, tmp_path) -> None:
    """A state captured one block early would give other logits."""
    found = capture(target, tmp_path / "states")
    ids = torch.tensor([documents()[1].input_ids])
    rows = torch.from_numpy(found.document == 1)
    with torch.inference_mode():
        logits = target.model(ids).logits[0]
        again = target.logits_from_prenorm(found.states[4][rows])
        early = target.logits_from_prenorm(found.states[3][rows])
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5)
    assert (early - logits).abs().max() > 0.05


def test_an_off_by_one_is_seen_in_the_values(target, tmp_path) -> None:
    found = capture(target, tmp_path / "states")
    for b in range(4):
        apart = (found.states[b] - found.states[b + 1]).norm(dim=1)
        assert (apart / found.states[b + 1].norm(dim=1)).min() > 1e-2


@pytest.mark.parametrize("batch_tokens", [1, 30, 90, 4096])
def test_batches_and_padding_change_nothing(batch_tokens, target, tmp_path) -> None:
    found = capture(target, tmp_path / "states", batch_tokens=batch_tokens)
    alone = [
        capture_states(target, [d], tmp_path / f"{i}", progress=False)
        for i, d in enumerate(documents())
    ]
    expected = torch.cat([s.states for s in alone], dim=1)
    scale = expected.abs().amax(dim=(1, 2), keepdim=True)
    assert ((found.states - expected) / scale).abs().max() < 1e-5
    np.testing.assert_allclose(
        found.entropy, np.concatenate([s.entropy for s in alone]), rtol=1e-5, atol=1e-6
    )


def test_predictive_entropy_is_that_of_the_softmax(target, tmp_path) -> None:
    found = capture(target, tmp_path / "states")
    with torch.inference_mode():
        logits = torch.cat(
            [target.model(torch.tensor([d.input_ids])).logits[0] for d in documents()]
        ).double()
    p = torch.softmax(logits, dim=-1)
    naive = -(p * torch.log(p)).sum(dim=-1).numpy()
    np.testing.assert_allclose(found.entropy, naive, rtol=1e-5, atol=1e-6)
    huge = torch.zeros(2, 32)
    huge[0, 0] = 1e4
    assert np.isfinite(predictive_entropy(target, huge).numpy()).all()


def test_facts_about_tokens(target, tmp_path) -> None:
    found = capture(target, tmp_path / "states")
    ids = [t for d in documents() for t in d.input_ids]
    assert found.token.tolist() == ids
    assert found.position.tolist() == [j for n in LENGTHS for j in range(n)]
    assert found.document.tolist() == [i for i, n in enumerate(LENGTHS) for _ in range(n)]
    assert found.special.tolist() == [j == 0 for n in LENGTHS for j in range(n)]
    assert found.documents == tuple(d.id for d in documents())
    np.testing.assert_allclose(
        found.rms, found.states.square().mean(dim=2).sqrt().numpy(), rtol=1e-5
    )


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_narrow_dtypes_and_chosen_boundaries(dtype, bits, target, tmp_path) -> None:
    wide = capture(target, tmp_path / "wide")
    found = capture(target, tmp_path / "narrow", dtype=dtype, boundaries=(0, 3))
    assert found.boundaries == (0, 3)
    assert found.states.dtype == getattr(torch, dtype)
    size = (tmp_path / "narrow" / "states.bin").stat().st_size
    assert size == 2 * sum(LENGTHS) * 32 * 2
    torch.testing.assert_close(
        found.states.float(), wide.states[[0, 3]], rtol=2.0**-bits, atol=1e-4
    )


# killed runs


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".npy")}


def test_a_killed_run_is_taken_up(target, tmp_path) -> None:
    """SIGKILL in the middle, then the same call: bytes equal those of an uninterrupted run."""
    whole = capture(target, tmp_path / "whole", batch_tokens=40)
    script = f"""
        import os, signal
        from pathlib import Path
        from paperlib import capture
        from paperlib.targets import load_target
        from tests.test_capture import documents
        count = 0
        commit = capture._Writer.commit
        def and_die(self, batch, entropy):
            global count
            commit(self, batch, entropy)
            count += 1
            if count == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        capture._Writer.commit = and_die
        capture.capture_states(
            load_target({target.name!r}), documents(), Path({str(tmp_path / "cut")!r}),
            batch_tokens=40, progress=False,
        )
    """
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "cut").exists()
    with pytest.raises(InputError, match="an unfinished capture lies beside it"):
        open_states(tmp_path / "cut")
    seen = []
    original = target.model.base_model.forward

    def counted(*args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    target.model.base_model.forward = counted
    try:
        capture(target, tmp_path / "cut", batch_tokens=40)
    finally:
        target.model.base_model.forward = original
    total = len(list(_batches_of(40)))
    assert 0 < len(seen) == total - 2
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert open_states(tmp_path / "cut").provenance == whole.provenance


def _batches_of(batch_tokens: int):
    from paperlib.capture import _batches

    return _batches(documents(), batch_tokens)


def test_an_unfinished_capture_of_something_else_is_refused(target, tmp_path) -> None:
    capture(target, tmp_path / "done")
    partial = tmp_path / ".other.partial"
    shutil.copytree(tmp_path / "done", partial)
    request = json.loads((partial / "capture.json").read_text()) | {"content": "else"}
    (partial / "request.json").write_text(json.dumps(request))
    np.save(partial / "done.npy", np.zeros(len(LENGTHS), dtype=bool))
    with pytest.raises(InputError, match="content = 'else'"):
        capture(target, tmp_path / "other")


# what is opened, what is refused


def test_a_finished_capture_is_opened_not_redone(target, tmp_path) -> None:
    capture(target, tmp_path / "states")
    before = (tmp_path / "states" / "states.bin").stat().st_mtime_ns
    again = capture(target, tmp_path / "states")
    assert (tmp_path / "states" / "states.bin").stat().st_mtime_ns == before
    assert again.tokens == sum(LENGTHS)
    with pytest.raises(InputError, match=r"with dtype = 'float32', asked for 'float16'"):
        capture(target, tmp_path / "states", dtype="float16")
    with pytest.raises(InputError, match="choose another folder or delete this one"):
        capture_states(target, documents(seed=1), tmp_path / "states", progress=False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "capture.json").unlink(), "no capture there"),
        (lambda p: (p / "capture.json").write_text("{"), "not JSON"),
        (lambda p: (p / "capture.json").write_text('{"format": "other"}'), "format 'other'"),
        (lambda p: (p / "capture.json").write_text("[]"), "expected 'paperlib-capture-1'"),
        (lambda p: os.truncate(p / "states.bin", 100), "100 bytes, expected .* truncated"),
        (lambda p: (p / "states.bin").unlink(), "0 bytes, expected"),
        (lambda p: (p / "entropy.npy").write_bytes(b"nothing"), "damaged capture"),
        (lambda p: (p / "tokens.npz").unlink(), "damaged capture"),
        (lambda p: np.save(p / "entropy.npy", np.zeros(3)), "entropy holds 3 tokens"),
    ],
)
def test_foreign_and_truncated_files_are_refused(damage, message, target, tmp_path) -> None:
    capture(target, tmp_path / "states")
    damage(tmp_path / "states")
    with pytest.raises(InputError, match=message):
        open_states(tmp_path / "states")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundaries": (2, 1)}, "must be ascending"),
        ({"boundaries": (1, 1)}, "without repeats"),
        ({"boundaries": ()}, "at least one"),
        ({"boundaries": (0, 5)}, r"must lie in 0\.\.4"),
        ({"boundaries": (-1, 2)}, r"must lie in 0\.\.4"),
        ({"dtype": "int8"}, "'int8' is not one of float32"),
    ],
)
def test_bad_requests(options, message, target, tmp_path) -> None:
    with pytest.raises(InputError, match=message):
        capture(target, tmp_path / "states", **options)
    assert not list(tmp_path.iterdir())


def test_no_documents(target, tmp_path) -> None:
    with pytest.raises(InputError, match="no documents"):
        capture_states(target, [], tmp_path / "states")
