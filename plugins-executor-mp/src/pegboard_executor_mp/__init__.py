"""Pegboard's multi-process executor and its message queue."""
