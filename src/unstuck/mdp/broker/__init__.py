"""The broker: rules without I/O in `core.py`, the socket in `socket_loop.py`, the ledger in `ledger_thread.py`."""
