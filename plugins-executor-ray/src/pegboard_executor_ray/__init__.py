"""Pegboard's Ray executors."""
