"""Trains the embedded checkpoint `tiny`: corpus, network, optimiser, two training phases, evaluation, export."""
