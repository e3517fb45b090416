"""Show a stored workflow: its outline, its story in words, and the same as plain values. Pure, for every door."""
