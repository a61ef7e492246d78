"""Decoding with heads: a candidate tree per step, verified by one forward pass of the base."""
