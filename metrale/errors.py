"""The errors that metrale raises on purpose: one each for start-up, for the planner, for a single request."""

from __future__ import annotations


class ConfigError(ValueError):
    """The engine cannot start as configured; the message names the field and the fix."""


class CapacityError(RuntimeError):
    """A plan asks for more slots, pages or rows than there are; raised before any device work."""


class RequestError(ValueError):
    """One request cannot go on; the message is for its user, other requests are not touched."""
