"""Threads collect garbage that Qt must not lose in them: clients come and go by the dozen, and the process lives."""

import os
import subprocess
import sys

from tests.acceptance.shop import Shop
from tests.fleet import ROOT

CLIENTS = 30
PATIENT_S = 240


def test_clients_and_desks_that_are_lost_in_any_thread_are_deleted_in_their_own(shop: Shop) -> None:
    shop.worker()
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.qt.garbage", str(CLIENTS), shop.url],
        cwd=ROOT,
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    assert "thread" not in done.stderr, "Qt complains of a foreign thread"
    assert done.stdout.startswith(f"{CLIENTS} came, 0 threads are left, "), done.stdout
