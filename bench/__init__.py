"""Benchmarks of the pipeline: `make bench`, or one of them by `python -m bench drain`.

Figures of a machine say little elsewhere, so most of what is told are ratios: two ways to do the same work on the same server, one after
the other in the same run, each as the median of several rounds.
"""
