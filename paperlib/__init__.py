"""Which hidden layers of an LLM should feed a speculative-decoding draft head, and why."""

__version__ = "0.1.0.dev0"
