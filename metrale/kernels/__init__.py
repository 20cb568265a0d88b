"""Operator tables and, one operator a file, the kernels behind them."""
