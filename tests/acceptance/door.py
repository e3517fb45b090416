"""Ask a web door that is open, and check that what it says has the right form."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.acceptance.shop import Shop

from unstuck.store.records import Held

API = "/api/v1"


@dataclass(frozen=True)
class Door:
    """A web door, and the ledger behind it."""

    shop: Shop
    client: httpx.Client
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def get(self, path: str, status: int = 200, **more: Any) -> Any:
        return self._said(self.client.get(API + path, **more), status)

    def post(self, path: str, body: Any = None, status: int = 200, **more: Any) -> Any:
        return self._said(self.client.post(API + path, json=body, **more), status)

    def problem(self, method: str, path: str, status: int, **more: Any) -> dict[str, Any]:
        """Ask for something that must be refused; give the problem."""
        response = self.client.request(method, API + path, **more)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"
        problem: dict[str, Any] = response.json()
        assert problem["status"] == status
        assert problem["type"] == f"urn:unstuck:problem:{problem['code']}"
        assert problem["detail"]
        assert problem["cure"]
        return problem

    def enqueue(self, **body: Any) -> int:
        return int(self.post("/jobs", {"task": "add", "args": [1, 2], **body}, 201)["id"])

    def queue(self) -> str:
        """Give a queue that no other test uses, served by a worker that is only written down."""
        name = f"queue-{next(self._numbers)}"
        self.shop.worker(f"of-{name}", f"worker-of-{name}", queues=(name,))
        return name

    def held(self, *, start: bool = True) -> Held:
        """Give a job that the worker of a queue of its own has in its hands."""
        queue = self.queue()
        self.enqueue(queue=queue)
        return self.shop.claim(f"of-{queue}", start=start, queue=queue)[0]

    def _said(self, response: httpx.Response, status: int) -> Any:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        return response.json()
