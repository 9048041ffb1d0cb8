"""Exhaustive S_2 over whole spaces of layer sets: python benchmarks/bench_selection.py

Exits with 1 when a search takes longer than its limit. The table is random; timing does not
depend on its values.
"""

import math
import sys
import time

import numpy as np

from paperlib.gram import GramTable
from paperlib.selection import exhaustive_s2, greedy_s2, landscape

CASES = [(81, 3, 1.0), (33, 5, 3.0)]  # boundaries, k, seconds


def random_table(size: int, seed: int = 0) -> GramTable:
    features = np.random.default_rng(seed).standard_normal((size, 256, 16))
    grams = np.stack([x @ x.T for x in features]).reshape(size, -1)
    trace = (features**2).sum(axis=(1, 2))
    return GramTable(tuple(range(size)), grams @ grams.T, trace, 256.0, 16)


def main() -> int:
    slow = 0
    for size, k, limit in CASES:
        table = random_table(size)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            best = exhaustive_s2(table, k)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        sets = len(landscape(table, k).scores)
        whole = time.perf_counter() - start
        start = time.perf_counter()
        greedy = greedy_s2(table, k)
        fast = time.perf_counter() - start
        assert sets == math.comb(size, k)
        slow += max(seconds) > limit
        print(
            f"C({size},{k}) = {sets:,} sets: exhaustive S_2 in {min(seconds):.3f} to "
            f"{max(seconds):.3f} s (limit {limit:g} s), landscape in {whole:.3f} s, "
            f"greedy in {fast:.3f} s and {best.score - greedy.score:.4f} nats short"
        )
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
