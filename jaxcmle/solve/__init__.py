"""Whole answers: from points to one solution with its guarantee."""
