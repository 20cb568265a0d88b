"""Drafters behind one protocol: propose, commit, restart, release."""
