"""Proofs a user can run on a model of their own."""
