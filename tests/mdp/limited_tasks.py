"""Tasks of which only so many may be at work at once, for those who call them by Majordomo."""

import time

from unstuck import App

app = App()


@app.task(concurrency_key="account:{account}", expires="1h", keep="2h")
def draw(path: str, account: str) -> str:
    with open(path, "a", buffering=1) as file:
        file.write(f"begin {account}\n")
        time.sleep(0.05)
        file.write(f"end {account}\n")
    return account


@app.task(concurrency_key=lambda path, account: account.upper(), concurrency_limit=2)
def draw_computed(path: str, account: str) -> str:
    return account


@app.task(concurrency_key="{account:.2}")
def draw_short(path: str, account: str | None) -> str:
    return str(account)
