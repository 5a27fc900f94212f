"""Sections of ``scripts/gpu_check.py``."""
