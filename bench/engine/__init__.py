"""Tokens a second of whole generations: plain decode against each drafter, and against transformers."""
