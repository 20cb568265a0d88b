"""Counters."""
