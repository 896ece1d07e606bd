"""Benchmarks: each prints the numbers that the README quotes."""
