"""The bell: wake-ups and those who wait for results."""
