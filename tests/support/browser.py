"""Look at the page with a real browser: Debian's Chromium, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    # Half of what a look costs is the start of a process for it: one draws for all windows.
    "--renderer-process-limit=1",
    "--disable-site-isolation-trials",
]


def chromium() -> str:
    """Give the browser's path; without one, skip what asked for it."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return found


@contextmanager
def browsing() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def looking(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a window of its own; whatever the browser complains of fails the test: a script, a style, a file that the
    page's own rules forbid."""
    context = browser.new_context(base_url=url, **options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
    try:
        yield page
    finally:
        context.close()
    assert not complaints, complaints


def wait_live(page: Page) -> None:
    page.locator("#connection[data-state=on]").wait_for()
