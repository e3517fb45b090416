"""Take the pictures of the docs from a running system: `make screenshots`.

Three workers run a small shop in a temporary folder. One job kills its process each time, one worker is killed. Then
Chromium takes a picture of the dashboard, and `unstuck why` tells the story of a job that was tried twice.
"""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

from unstuck import JobFailed, JobQuarantined

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
UNSTUCK = [sys.executable, "-m", "unstuck.cli.main"]
TIMEOUT_S = 60.0
SHOP = """
import os
import random
import time

from unstuck import App, Context

app = App("sqlite:///shop.db")


@app.task(queue="mail")
def send_receipt(order: int) -> str:
    time.sleep(random.uniform(0.02, 0.2))
    if order % 29 == 0:
        raise ConnectionRefusedError("mail.example.com:25 refused the connection")
    return f"receipt of order {order} sent"


@app.task(queue="pictures", on_crash="retry")
def resize(picture: str, width: int) -> str:
    time.sleep(random.uniform(0.1, 0.5))
    return f"{picture} is {width} pixels wide"


@app.task(queue="pictures", on_crash="retry")
def scan(ctx: Context, picture: str) -> str:
    print(f"decoding {picture}")
    if ctx.attempt == 1:
        os.kill(os.getpid(), 9)
    return "clean"


@app.task(queue="reports", on_crash="retry", max_crash_retries=1)
def corrupt_archive(name: str) -> None:
    os.abort()


@app.task(queue="reports")
def monthly_report(ctx: Context, month: str) -> None:
    for part in range(1, 601):
        ctx.progress(part / 600, f"customer {part} of 600")
        time.sleep(0.5)
"""


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("Chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        (folder / "shop.py").write_text(SHOP)
        start(stack, folder, "up.log", "up", "shop:app", "--workers", "3", "--concurrency", "4")
        scanned = fill(folder)
        served = start(stack, folder, "serve.log", "serve", "shop:app", "--port", "0")
        url = wait_for(lambda: next((word for word in served().split() if word.startswith("http://")), ""), served)
        kill_a_worker(folder)
        time.sleep(5)  # The charts draw a point per second.
        with sync_playwright() as playwright:
            window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
            page = window.new_page(viewport={"width": 1320, "height": 1180}, color_scheme="light")
            page.goto(url)
            page.wait_for_timeout(2_500)
            page.screenshot(path=IMAGES / "dashboard.png")
            window.close()
        told = run(folder, "--app", "shop:app", "why", str(scanned))
        console = Console(record=True, width=132, file=(folder / "why.txt").open("w"))
        console.print(Text(f"$ unstuck why {scanned}\n{told}"), soft_wrap=False)
        console.save_svg(str(IMAGES / "why.svg"), title="unstuck why")


def start(stack: ExitStack, folder: Path, log: str, *arguments: str) -> Callable[[], str]:
    """Start a command that runs until the pictures are taken; return what reads its log."""
    output = stack.enter_context((folder / log).open("wb"))
    process = subprocess.Popen([*UNSTUCK, *arguments], cwd=folder, stdout=output, stderr=output)
    stack.callback(process.wait, TIMEOUT_S)
    stack.callback(process.terminate)
    return lambda: (folder / log).read_text()


def fill(folder: Path) -> int:
    """Enqueue a day's work; return the id of a job that was tried twice."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    shop: Any = importlib.import_module("shop")
    log = folder / "up.log"
    wait_for(lambda: "Worker started" in log.read_text(), log.read_text)
    shop.monthly_report.enqueue("2026-10")
    broken = [shop.corrupt_archive.enqueue(f"backup-{number}.tar") for number in range(2)]
    scanned = shop.scan.enqueue("beach.png")
    shop.send_receipt.enqueue_many([(number,) for number in range(1, 1500)])
    shop.resize.enqueue_many([(f"{number}.png", 640) for number in range(1, 500)])
    scanned.result(timeout=TIMEOUT_S)
    for job in broken:
        try:
            job.result(timeout=TIMEOUT_S)
        except (JobFailed, JobQuarantined):
            continue
    return int(scanned.id)


def kill_a_worker(folder: Path) -> None:
    """Kill one of our own workers, as the out-of-memory killer would."""
    workers = [
        process
        for process in psutil.Process().children(recursive=True)
        if "worker" in process.cmdline() and Path(process.cwd()) == folder
    ]
    workers[0].kill()


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run([*UNSTUCK, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def wait_for(look: Callable[[], object], said: Callable[[], str]) -> str:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (seen := look()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(said())
        time.sleep(0.1)
    return str(seen)


if __name__ == "__main__":
    main()
