"""Kernels run under Triton's interpreter in a process of their own: the choice binds when triton is imported."""

from __future__ import annotations

import triton

collect_ignore = [] if triton.knobs.runtime.interpret else ["interpreted"]
