"""Fixtures for plugin authors."""
