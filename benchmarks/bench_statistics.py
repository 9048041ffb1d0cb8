"""All-pairs CKA and S_2 against peer packages: time and memory as ratios of one run, and errors.

    pip install --no-deps pytorch-cka==1.1.3 torch-cka==0.21 ckatorch==1.0.3 repsim==0.1.5
    python benchmarks/bench_statistics.py [--n 512 2048 8192] [--dtype float32] [--threads 2]

Same arrays (L 31, d 576, a shared mean offset of 0 or 50), same dtype and threads; biased is
compared with biased and debiased with debiased. Memory is the peak of anonymous memory over what
the process held before the call: the states lie on disk (ours) or are given in memory (peers, not
counted). Peers that are not installed, or that would need more memory than ``--limit-gb``, are
left out and named. Each method runs in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

L, D = 31, 576
OURS = "paperlib"
DEBIASED = ("pytorch-cka", "torch-cka", "repsim-song")
METHODS = (OURS, "pytorch-cka", "repsim", "repsim-song", "torch-cka", "ckatorch")


def features(n: int, offset: float, dtype: str) -> torch.Tensor:
    """[L, n, d] a random walk over depth: neighbours alike, distant layers less so."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, D, generator=generator)
    layers = []
    for _ in range(L):
        x = 0.9 * x + 0.44 * torch.randn(n, D, generator=generator)
        layers.append(x + offset)
    return torch.stack(layers).to(getattr(torch, dtype))


def oracle(x: torch.Tensor, debiased: bool) -> np.ndarray:
    """float64, features centred first, one pair of boundaries at a time."""
    x = x.double()
    x = x - x.mean(dim=1, keepdim=True)
    n = x.shape[1]
    cross = torch.zeros(L, L, dtype=torch.float64)
    for i in range(L):
        for j in range(i, L):
            cross[i, j] = cross[j, i] = (x[i].T @ x[j]).square().sum()
    if debiased:
        g = x.square().sum(dim=2)
        trace = g.sum(dim=1)
        cross = cross - n / (n - 2) * (g @ g.T) + torch.outer(trace, trace) / ((n - 1) * (n - 2))
    scale = cross.diagonal().sqrt()
    return (cross / torch.outer(scale, scale)).numpy()


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    def __enter__(self) -> "PeakMemory":
        self.before = self.peak = anonymous()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.stop.wait(0.005):
            self.peak = max(self.peak, anonymous())

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    @property
    def extra(self) -> int:
        return self.peak - self.before


def run_method(method: str, n: int, offset: float, dtype: str, threads: int) -> dict:
    torch.set_num_threads(threads)
    x = features(n, offset, dtype)
    results: dict[str, np.ndarray] = {}
    if method == OURS:
        from paperlib.capture import TokenStates
        from paperlib.cka import linear_cka
        from paperlib.entropy import collision_entropy
        from paperlib.gram import gram_statistics

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "states.bin"
            x.numpy().tofile(path)
            disk = torch.from_file(str(path), shared=False, size=x.numel(), dtype=x.dtype)
            states = TokenStates(
                path=Path(folder),
                boundaries=tuple(range(L)),
                num_layers=L - 1,
                states=disk.view(L, n, D),
                rms=np.ones((L, n)),
                entropy=np.zeros(n),
                document=np.arange(n) // 128,
                position=np.arange(n) % 128,
                token=np.zeros(n, dtype=int),
                special=np.zeros(n, dtype=bool),
                documents=tuple(map(str, range(n // 128 + 1))),
                provenance={"target": "", "fingerprint": "", "content": "", "dtype": dtype},
            )
            del x
            with PeakMemory() as memory:
                start = time.perf_counter()
                stats = gram_statistics(states, dtype=getattr(torch, dtype), progress=False)
                for debiased in (False, True):
                    table = stats.table(debiased=debiased)
                    results["debiased" if debiased else "biased"] = linear_cka(table)
                    collision_entropy(table)
                seconds = time.perf_counter() - start
    else:
        layers = list(x)
        with PeakMemory() as memory:
            start = time.perf_counter()
            kind = "debiased" if method in DEBIASED else "biased"
            results[kind] = peer(method, layers)
            seconds = time.perf_counter() - start
        x = torch.empty(0)
    exact = features(n, offset, dtype)
    errors = {
        k: float(np.abs(v - oracle(exact, k == "debiased")).max()) for k, v in results.items()
    }
    return {"seconds": seconds, "memory": memory.extra, "errors": errors}


def peer(method: str, layers: list[torch.Tensor]) -> np.ndarray:
    if method == "pytorch-cka":
        from cka import cka_from_features

        return cka_from_features(layers, layers).numpy()
    if method.startswith("repsim"):
        import repsim

        estimator = "song" if method.endswith("song") else "gretton"
        mats = [layer.numpy() for layer in layers]
        return np.asarray(repsim.cka(mats, kernel_type="linear", estimator=estimator))
    if method == "ckatorch":
        from ckatorch.core import cka_base

        return np.array([[float(cka_base(a, b)) for b in layers] for a in layers])
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch_cka import CKA

    class Layers(nn.Module):
        """Hands out the given features, a module a layer."""

        def __init__(self) -> None:
            super().__init__()
            self.taps = nn.ModuleList(nn.Identity() for _ in range(L))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            for tap, layer in zip(self.taps, layers, strict=True):
                tap(layer[rows])
            return rows

    names = [f"taps.{i}" for i in range(L)]
    model = CKA(Layers(), Layers(), model1_layers=names, model2_layers=names, device="cpu")
    rows = torch.arange(len(layers[0]))
    loader = DataLoader(TensorDataset(rows), batch_size=len(rows))
    model.compare(loader, loader)
    return model.export()["CKA"].numpy()


def expected_memory(method: str, n: int, dtype: str) -> float:
    """Bytes of the Grams that a method holds at once, from its source."""
    size = {"float32": 4, "float64": 8}[dtype]
    return {
        "pytorch-cka": 2 * L * n * n * size * 1.1,
        "repsim": L * n * n * 8,
        "repsim-song": L * n * n * 8,
    }.get(method, 6 * n * n * 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"])
    parser.add_argument("--offset", type=float, nargs="+", default=[0.0, 50.0])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-gb", type=float, default=16)
    parser.add_argument("--limit-seconds", type=float, default=300)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        method, n, offset, dtype = args.one
        print("RESULT" + json.dumps(run_method(method, int(n), float(offset), dtype, args.threads)))
        return
    print(f"L = {L}, d = {D}, {args.threads} threads; time and memory as ratios to paperlib\n")
    header = ("dtype", "n", "offset", "method", "seconds", "ratio", "extra MB", "error")
    print("| " + " | ".join(header) + " |")
    print("|" + " --- |" * len(header))
    for dtype in args.dtype:
        for n in args.n:
            for offset in args.offset:
                ours: dict = {}
                for method in args.methods:
                    row = _row(method, n, offset, dtype, args)
                    if isinstance(row, str):
                        print(
                            f"| {dtype} | {n} | {offset:g} | {method} | {row} | | | |", flush=True
                        )
                        continue
                    ours = row if method == OURS else ours
                    ratio = row["seconds"] / ours["seconds"] if ours else float("nan")
                    errors = ", ".join(f"{k} {v:.0e}" for k, v in row["errors"].items())
                    print(
                        f"| {dtype} | {n} | {offset:g} | {method} | {row['seconds']:.2f} "
                        f"| {ratio:.2f} | {row['memory'] / 1e6:.0f} | {errors} |",
                        flush=True,
                    )


def _row(method: str, n: int, offset: float, dtype: str, args: argparse.Namespace) -> dict | str:
    if method != OURS and expected_memory(method, n, dtype) > args.limit_gb * 1e9:
        return f"not run: needs about {expected_memory(method, n, dtype) / 1e9:.0f} GB"
    command = [sys.executable, __file__, "--threads", str(args.threads)]
    command += ["--one", method, str(n), str(offset), dtype]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not finished in {args.limit_seconds:.0f} s"
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return json.loads(line.removeprefix("RESULT"))
    return "failed: " + (done.stderr.strip().splitlines() or ["no output"])[-1][:80]


if __name__ == "__main__":
    main()
