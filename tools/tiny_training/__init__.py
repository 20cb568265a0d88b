"""Trains the embedded checkpoint `tiny`: corpus, network, optimiser, three training phases, evaluation, export."""
