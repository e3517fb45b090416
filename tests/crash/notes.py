"""Write down what really happened, whatever the ledger says: tasks of the crash tests do."""


def note(path: str, word: str) -> None:
    """Append one line, atomically."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{word}\n")
