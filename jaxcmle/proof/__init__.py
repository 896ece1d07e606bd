"""Proof of optimality: pricing one cluster, cells, branch and bound, choice of the duals."""
