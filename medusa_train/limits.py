"""Limits that the command line, recipes and the code behind them share.

Standard library only: ``--help`` and ``validate`` read them without torch, and an export ships this
file.
"""

MAX_TREE_NODES = 1024
"""Nodes of a candidate tree, without its root: each is a row of a forward pass in every step."""
