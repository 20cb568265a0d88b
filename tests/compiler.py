"""What tests of the `cpu` backend need; without it they are reported as skipped, and `.ci/run` fails."""

from __future__ import annotations

import pytest

from metrale import native

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="no C compiler on this machine")
