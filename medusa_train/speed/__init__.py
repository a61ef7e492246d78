"""The measured speed of decoding with heads: what ``medusa-eval speedup`` does."""
