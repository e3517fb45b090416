"""Start workflows for tests of doors: no worker of flesh and blood takes their jobs, `Cli` does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.cli import Cli

from unstuck import App, Task, Workflow
from unstuck.domain.workflows import OnError


@contextmanager
def opened_app(shop: Cli) -> Iterator[tuple[App, Task[Any, Any]]]:
    app = App(shop.url)
    try:
        yield app, app.task(name="add")(lambda *args, **kwargs: None)
    finally:
        app.close()


def three(app: App, add: Task[Any, Any], name: str = "bills", on_error: OnError = "fail") -> Workflow:
    """`fetch`, then a group of `price` and `tax`, then `send`."""
    flow = app.workflow(name)
    fetch = flow.add(add, 1).named("fetch").on_error(on_error)
    group = flow.group("figures")
    price = group.add(add, fetch).named("price")
    group.add(add, price).named("tax")
    flow.add(add, group).named("send")
    return flow


def end_workflows(shop: Cli) -> None:
    """Cancel the workflows that earlier tests left behind: `Shop.claim` takes the oldest job, whoever made it."""
    with opened_app(shop) as (app, _):
        for state in ("running", "paused"):
            for left in app.ledger.workflows.list(state):
                app.operator.workflows.cancel(left.id)


def start(shop: Cli, on_error: OnError = "fail", name: str = "bills") -> int:
    with opened_app(shop) as (app, add):
        return three(app, add, name, on_error).start().id


def start_mapped(shop: Cli, items: int, bad: int) -> int:
    """Give a workflow whose map over so many items has gone through all of them; one failed, the rest succeeded."""
    with opened_app(shop) as (app, add):
        flow = app.workflow("pages")
        pages = flow.add(add).named("pages")
        parsed = flow.map(add, pages).named("parse").on_error("continue")
        flow.add(add, parsed).named("total")
        number = flow.start().id
    shop.succeed(shop.claim(start=True)[0], f"[{','.join(map(str, range(items)))}]".encode())
    for at, held in enumerate(shop.claim(start=True, limit=items)):
        if at == bad:
            shop.fail(held, "page is torn")
        else:
            shop.succeed(held, b"1")
    return number
