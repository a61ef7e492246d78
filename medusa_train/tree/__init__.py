"""Candidate trees: their topology, and the search for the best one."""
