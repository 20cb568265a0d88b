"""Tests of the model room. transformers is the oracle: it is imported after this."""

import sys

# Where these can be imported, transformers binds their GPU kernels, and its forward pass on a CPU fails.
sys.modules["fla"] = None  # type: ignore[assignment]
sys.modules["causal_conv1d"] = None  # type: ignore[assignment]
