"""Benchmarks of the pipeline: `make bench`, or `python -m bench drain` for one of them.

Figures from one machine say little about another, so most results are ratios: two ways to do the same work on the same server, one after
the other in the same run, each the median of several rounds.
"""
