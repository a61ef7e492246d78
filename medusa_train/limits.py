"""Limits that the command line, recipes and the code behind them share.

Standard library only: ``--help`` and ``validate`` read them without torch, and an export ships this
file.
"""

MAX_TREE_NODES = 1024
"""Nodes of a candidate tree, without its root: each is a row of a forward pass in every step."""

MAX_SEED = 2**32 - 1
"""Of every generator that is seeded."""

MIN_TEMPERATURE = 0.001
"""Above 0, which is greedy: logits are divided by it, and must stay finite."""

MAX_TEMPERATURE = 100.0
"""At which the most unlike tokens are almost alike."""

MAX_BOOTSTRAP = 100_000
"""Resamples of an interval: each has a weight for each conversation in memory."""

MAX_TURNS = 1000
"""Of a conversation that is generated: its plan is made before its first turn."""

MAX_CONCURRENCY = 4096
"""Requests at a time to one server: each is a thread and a connection."""

MAX_TIMEOUT = 1e6
"""Seconds; the system's clocks know no such times as 1e12."""
