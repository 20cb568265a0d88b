"""Microbenchmarks of the operators: `python -m bench.kernels [OPERATOR ...]`, or one module by its own name."""
