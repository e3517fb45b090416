"""Measure Unstuck: what it does per second, what it costs, and how soon it sees a death."""
