"""The tasks under test in an app that is slow to import and cannot be forked: each runner imports it anew.

With `IMPORT_GATE` the import lasts until that file is there."""

import os
import threading
import time

from tests.crash.apps.tasks import app

__all__ = ["app"]

threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
if gate := os.environ.get("IMPORT_GATE"):
    while not os.path.exists(gate):
        time.sleep(0.01)
else:
    time.sleep(2.0)
