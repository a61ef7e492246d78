"""The model card of heads: what the hub shows of them, and what a reader wants to know."""
