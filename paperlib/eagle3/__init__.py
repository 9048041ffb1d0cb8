"""EAGLE-3 draft heads: data, vocabulary, head, training and the n-gram baselines."""
