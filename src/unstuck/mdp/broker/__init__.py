"""The broker: pure rules in `core.py`, the socket in `loop.py`, the ledger behind `desk.py`."""
