"""Train Medusa heads on any Hugging Face causal language model.

The package imports nothing here, so that ``import medusa_train`` and ``--help`` stay fast.
"""

__version__ = "0.1.0"
