import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paperlib.eagle3 import train
from paperlib.eagle3.draft import config_for
from paperlib.eagle3.vocab import frequent
from paperlib.errors import InputError
from tests.eagle3.tiny import cached, conversations, random_head, tiny_target
from tests.eagle3.worker import BOUNDARIES, SPREAD, run

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def batch_of(target, count: int = 2, steps: int = 3, seed: int = 0) -> train.Batch:
    data = conversations(target, count, seed)
    items = [data.get(i, BOUNDARIES) for i in range(count)]
    return train.collate(items, steps, torch.device("cpu"))


def test_supervised_rows_are_those_that_drafting_reaches() -> None:
    # tokens 0 1 2 | 3 4 5 6 (response) | 7 (prompt) | 8 9 (response)
    response = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    zeros = torch.zeros(1, 10, 4)
    item = train.Example(
        "a", torch.arange(10), response, zeros, zeros[0], torch.arange(10).roll(-1)
    )
    batch = train.collate([item], 3, torch.device("cpu"))
    expected = {
        i: {
            t
            for t in range(10)
            if t + 2 + i < 10 and all(response[t + 1 + j] for j in range(i + 2))
        }
        for i in range(3)
    }
    assert expected[0] == {2, 3, 4, 7}
    for i in range(3):
        found = {int(batch.rows[0, r]) for r in torch.nonzero(batch.supervised[i, 0])[:, 0]}
        assert found == expected[i]
        assert train.step_rows(response.numpy(), 3)[i] == len(expected[i])
    # the target's token for row t at step i is the one after position t + 1 + i
    for r, t in enumerate(batch.rows[0].tolist()):
        for i in range(3):
            if batch.supervised[i, 0, r]:
                assert batch.best[0, r + i] == t + 2 + i


def test_loss_and_counts_equal_the_formulas() -> None:
    target, steps = tiny_target(), 3
    head = random_head(target, dtype=torch.float32)
    data = conversations(target, 3)
    test = train.TrainingTest(head, target, steps)
    items = [data.get(i, BOUNDARIES) for i in range(3)]
    batch = train.collate(items, steps, torch.device("cpu"))
    out = test(batch)
    states = train.rollout_states(head, batch, steps)
    ids = head.vocab.target_ids.tolist()
    loss, correct, rows = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for b, item in enumerate(items):
        with torch.no_grad():
            full = target.model(input_ids=item.tokens[None], use_cache=False).logits[0]
        for r, t in enumerate(batch.rows[b].tolist()):
            for i in range(steps):
                if not batch.supervised[i, b, r]:
                    continue
                rows[i] += 1
                wanted = int(full[t + 1 + i].argmax())
                logits = head.logits(states[i][b, r])
                guess = ids[int(logits.argmax())]
                correct[i] += guess == wanted
                if wanted in ids:
                    p = full[t + 1 + i][ids].softmax(-1)
                    loss[i] += float(-(p * logits.detach().log_softmax(-1)).sum())
    np.testing.assert_allclose(out.loss.detach().numpy(), loss, rtol=1e-4)
    np.testing.assert_array_equal(out.correct.numpy(), correct)
    np.testing.assert_array_equal(out.rows.numpy(), rows)
    assert (out.loss > 0).all()


def test_soft_cross_entropy_gradient_in_double() -> None:
    torch.manual_seed(0)
    z = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    p = torch.rand(5, 7, dtype=torch.float64).softmax(-1)
    weight = torch.tensor([1.0, 0.0, 1.0, 2.0, 0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: train.SoftCrossEntropy.apply(x.clone(), p, weight), (z,)
    )
    plain = -(weight[:, None] * p * z.log_softmax(-1)).sum()
    assert torch.allclose(train.SoftCrossEntropy.apply(z.clone(), p, weight), plain)


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True, "qk_norm": True}])
def test_gradients_of_the_whole_loss_in_double(options: dict) -> None:
    """Every parameter, along random directions, against central differences."""
    target = tiny_target()
    target.model.double()
    head = random_head(target, **options)
    test = train.TrainingTest(head, target, 3)
    batch = batch_of(target)
    decay = 0.8 ** torch.arange(3, dtype=torch.float64)

    def loss() -> torch.Tensor:
        return (test(batch).loss * decay).sum()

    loss().backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        if not parameter.requires_grad:
            continue
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        analytic = float((parameter.grad * direction).sum())
        step = 1e-6
        with torch.no_grad():
            parameter += step * direction
            up = float(loss())
            parameter -= 2 * step * direction
            down = float(loss())
            parameter += step * direction
        numeric = (up - down) / (2 * step)
        assert numeric == pytest.approx(analytic, rel=1e-5, abs=1e-6), name


def test_rows_without_supervision_do_not_matter() -> None:
    target = tiny_target()
    head = random_head(target, dtype=torch.float32)
    test = train.TrainingTest(head, target, 3)
    data = conversations(target, 2, seed=4)
    short, long = sorted((data.get(i, BOUNDARIES) for i in range(2)), key=lambda e: len(e.tokens))
    alone = [test(train.collate([e], 3, torch.device("cpu"))).loss for e in (short, long)]
    together = test(train.collate([short, long], 3, torch.device("cpu"))).loss
    torch.testing.assert_close(together, alone[0] + alone[1], rtol=1e-5, atol=1e-4)


def test_online_and_cached_examples_agree() -> None:
    online = conversations(tiny_target(), 3)
    kept = cached(online, (1, 3, 5))
    for i in range(3):
        a, b = online.get(i, (1, 5)), kept.get(i, (1, 5))
        assert torch.equal(a.states, b.states)
        assert torch.equal(a.final, b.final)
        assert torch.equal(a.best, b.best)
    torch.testing.assert_close(online.median_rms((1, 5)), kept.median_rms((1, 5)))
    # the recomputed logits are the model's: the next token of a greedy answer is their argmax
    tokens, response = kept.tokens[0], kept.responses[0]
    where = np.flatnonzero(response)
    assert (kept.best[where - 1] == tokens[where]).all()
    with pytest.raises(InputError, match="were not captured"):
        kept.get(0, (2,))


def test_a_head_learns_a_small_set_by_heart(tmp_path: Path) -> None:
    target = tiny_target()
    data = cached(conversations(target, 8), BOUNDARIES)
    vocab = frequent(np.ones(target.vocab_size, dtype=int), target.vocab_size)
    options = train.TrainConfig(passes=12_000, batch=4, lr=5e-3, evaluate_every=10_000)
    head = train.train(
        target,
        data,
        range(8),
        (),
        config_for(target, BOUNDARIES, vocab.size),
        vocab,
        options,
        tmp_path / "run",
        progress=False,
    )
    judged = train.evaluate(train.TrainingTest(head, target, 3), data, range(8))
    assert judged.accuracy[0] > 0.95
    assert judged.tau > 3
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert float(rows[-1]["loss_1"]) < float(rows[0]["loss_1"])
    assert all(0 <= float(r[f"accuracy_{i}"]) <= 1 for r in rows for i in (1, 2, 3))


def test_conditioning_whitens_and_starts_at_the_regression() -> None:
    target = tiny_target()
    data = cached(conversations(target, 12, response=30), BOUNDARIES)
    vocab = frequent(np.ones(target.vocab_size, dtype=int), target.vocab_size)
    config = config_for(target, BOUNDARIES, vocab.size)
    options = train.TrainConfig(whiten=1e-6, ridge_start=1e-3)
    head = train.build_head(target, config, vocab, options, data.median_rms(BOUNDARIES))
    train.condition(head, data, range(12), options)
    x, y = [], []
    for i in range(12):
        e = data.get(i, BOUNDARIES)
        for t in range(len(e.tokens) - 1):
            if e.response[t + 1] and t + 2 < len(e.tokens):
                x.append((e.states[:, t] * head.scale[:, None]).flatten().double().numpy())
                f = e.final[t + 1].double().numpy()
                y.append(f / np.sqrt((f**2).mean()))
    x, y = np.array(x), np.array(y)
    white = x @ head.whitening.double().numpy()
    values = np.linalg.eigvalsh(white.T @ white / len(x))
    assert values.max() / np.sort(values)[len(values) // 2] < 1.05  # all directions alike
    moment = white.T @ white / len(x)
    penalty = 1e-3 * np.trace(moment) / len(moment) * np.eye(len(moment))
    expected = np.linalg.solve(moment + penalty, white.T @ y / len(x)).T
    np.testing.assert_allclose(head.fc.weight.detach().numpy(), expected, rtol=0.02, atol=2e-3)
    before = head.fuse(e.states.transpose(0, 1))
    head.fold_scale()
    torch.testing.assert_close(head.fuse(e.states.transpose(0, 1)), before, rtol=1e-3, atol=1e-4)


def test_embedding_start_is_the_regression_on_states_and_embedding() -> None:
    """With all ranks available and one token in sight, the head's output is the regression."""
    target = tiny_target()
    data = cached(conversations(target, 12, response=30), BOUNDARIES)
    vocab = frequent(np.ones(target.vocab_size, dtype=int), target.vocab_size)
    options = train.TrainConfig(whiten=1e-3, ridge_start=1e-2, embedding_start=True)
    config = config_for(target, BOUNDARIES, vocab.size, num_key_value_heads=4)
    head = train.build_head(target, config, vocab, options, data.median_rms(BOUNDARIES))
    train.condition(head, data, range(12), options)
    unit = lambda v: v / v.square().mean(-1, keepdim=True).sqrt()  # noqa: E731
    x, y = [], []
    for i in range(12):
        e = data.get(i, BOUNDARIES)
        t = torch.nonzero(e.response)[:-1, 0] - 1
        white = (e.states[:, t] * head.scale[:, None, None]).transpose(0, 1).flatten(1)
        normed = head.midlayer.input_layernorm(head.embed_tokens(e.tokens[t + 1])).detach()
        x.append(torch.cat([white @ head.whitening, normed], 1))
        y.append(unit(e.final[t + 1]))
    x, y = torch.cat(x).double(), torch.cat(y).double()
    moment = x.T @ x / len(x)
    penalty = 1e-2 * moment.diagonal().mean() * torch.eye(len(moment))
    expected = x @ torch.linalg.solve(moment + penalty, x.T @ y / len(x))
    found = []
    for i in range(12):
        e = data.get(i, BOUNDARIES)
        t = torch.nonzero(e.response)[:-1, 0] - 1
        states = e.states[:, t].transpose(0, 1)
        h, _, _ = head.extend(e.tokens[t + 1][:, None], head.fuse(states)[:, None], t[:, None])
        found.append(h[:, 0])
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=0.02, atol=0.02)
    with pytest.raises(InputError, match="ridge_start"):
        train.condition(head, data, range(12), train.TrainConfig(embedding_start=True))


def test_taus_of_a_hand_counted_trace() -> None:
    # rounds of a decode: start at 0, accept 2, go on at 3, accept 0, go on at 4, accept 1
    tau, walk, rows = train.taus([np.array([2, 0, 1, 0, 1, 0])])
    assert tau == pytest.approx(1 + 4 / 6)
    assert walk == pytest.approx(1 + 3 / 3)
    assert rows == 6


def test_plan_is_paired_and_keeps_to_the_budget() -> None:
    rows = [5, 9, 0, 7, 6]
    options = train.TrainConfig(passes=60, batch=2)
    made = train.plan(rows, range(5), options)
    assert made == train.plan(rows, range(5), options)
    assert made.passes[-1] >= 60 > made.passes[-2]
    assert 2 not in {i for g in made.groups for i in g}
    first_epoch = [i for g in made.groups[:2] for i in g]
    assert sorted(first_epoch) == [0, 1, 3, 4]
    other = train.plan(rows, range(5), train.TrainConfig(passes=60, batch=2, seed=1))
    assert other.groups != made.groups
    # two processes with batch 1 take the same steps
    spread = train.plan(rows, range(5), train.TrainConfig(passes=60, batch=1), world=2)
    assert spread.groups == made.groups


def test_learning_rate_warms_up_and_falls() -> None:
    options = train.TrainConfig(lr=2.0, warmup=0.1, final_lr=0.1)
    rates = [train.learning_rate(options, s, 100) for s in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates[99] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_a_loss_that_is_not_finite_names_step_and_record(tmp_path: Path) -> None:
    target = tiny_target()
    data = cached(conversations(target, 3), BOUNDARIES)
    data.states[:, int(data.starts[1]) + 2] = float("nan")
    vocab = frequent(np.ones(target.vocab_size, dtype=int), target.vocab_size)
    config = config_for(target, BOUNDARIES, vocab.size)
    options = train.TrainConfig(passes=100)
    with pytest.raises(InputError, match=r"optimiser step \d+, records c1: not finite"):
        train.train(target, data, range(3), (), config, vocab, options, tmp_path / "run")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    options = train.TrainConfig(passes=200, checkpoint_every=1)
    run(tmp_path / "run", options, stop_after=3)
    other = train.TrainConfig(passes=200, checkpoint_every=1, lr=3e-3)
    with pytest.raises(InputError, match="another run"):
        run(tmp_path / "run", other)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"steps": 0}, {"warmup": 1.0}])
def test_bad_options(options: dict) -> None:
    with pytest.raises(InputError):
        train.TrainConfig(**options)


@pytest.mark.slow
def test_kill_and_resume_is_bitwise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.eagle3.worker"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([*command, str(whole)], check=True, env=ENV, cwd=ROOT)
    victim = subprocess.Popen([*command, str(broken)], env=ENV, cwd=ROOT)
    try:
        wanted = int(np.random.default_rng().integers(10, 120))
        metrics = broken / "metrics.csv"
        while victim.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") > wanted:
                break
            time.sleep(0.002)
        assert victim.poll() is None, "the run ended before it could be killed"
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    assert not (broken / "head").exists()
    assert (broken / "checkpoint.safetensors").exists()
    subprocess.run([*command, str(broken)], check=True, env=ENV, cwd=ROOT)
    one, two = (load_file(p / "head" / "head.safetensors") for p in (whole, broken))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)

    def steps(path: Path) -> list[dict]:
        rows = list(csv.DictReader((path / "metrics.csv").open()))
        return [{k: v for k, v in r.items() if k != "seconds"} for r in rows]

    assert steps(whole) == steps(broken)


@pytest.mark.slow
def test_two_processes_equal_one_with_the_doubled_batch(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "tests.eagle3.worker", str(tmp_path / "two"), "gloo"]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    workers = [
        subprocess.Popen(command, env={**ENV, **places, "RANK": str(r)}, cwd=ROOT) for r in (0, 1)
    ]
    assert [w.wait(timeout=300) for w in workers] == [0, 0]
    before = torch.get_default_dtype()
    try:
        run(tmp_path / "one", SPREAD, torch.float64)
    finally:
        torch.set_default_dtype(before)
    one, two = (load_file(tmp_path / p / "head" / "head.safetensors") for p in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-9, atol=1e-11)
    read = [list(csv.DictReader((tmp_path / p / "metrics.csv").open())) for p in ("one", "two")]
    assert len(read[0]) == len(read[1])
    for a, b in zip(*read, strict=True):
        assert a["accuracy_1"] == b["accuracy_1"]
        assert 0 <= float(b["accuracy_1"]) <= 1
