"""Heads in the forms that engines load."""
