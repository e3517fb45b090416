"""Say that a queue has nobody to serve it, in the same words at every door."""


def why_unserved(queue: str, living: int) -> str:
    """`living` workers serve other queues."""
    verb = "serves" if living == 1 else "serve"
    others = f" ({living:,} worker{'' if living == 1 else 's'} {verb} other queues)" if living else ""
    return f"No living worker serves queue {queue!r}{others}"


def cure_unserved(queue: str) -> str:
    return f"start one with `unstuck worker module:app --queues {queue}`"
