"""Drafters behind one protocol: propose, commit, release."""
