"""The table of operators, the row groups that they take and, one operator a file, their Triton kernels."""
