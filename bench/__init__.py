"""Benchmarks: each figure is gated by correctness and stands beside its baseline from the same run."""
