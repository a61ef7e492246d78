"""How far training has moved a base model: what ``medusa-eval quality`` does."""
