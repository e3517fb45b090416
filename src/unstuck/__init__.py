"""Unstuck: durable background jobs for Python that survive the death of their workers."""

__version__ = "0.1.0"
