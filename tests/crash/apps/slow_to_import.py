"""The tasks under test in an app that is slow to import and cannot be forked: each runner imports it anew."""

import threading
import time

from tests.crash.apps.tasks import app

__all__ = ["app"]

threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
time.sleep(2.0)
