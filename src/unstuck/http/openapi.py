"""Let FastAPI take and describe msgspec Structs, and complete the OpenAPI document."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from unstuck.http.problems import MEDIA_TYPE, ProblemDetails


def json_response(view: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Give plain values as JSON.

    Not by way of pydantic: results of jobs may be nested or sized so that it would stumble, and numbers stay as exact
    as they were stored. That the views fit the models is shown by tests."""
    return Response(msgspec.json.encode(view, enc_hook=str), status, headers, "application/json")


OPEN = ("/healthz", "/readyz")
"""Nobody is asked who they are there."""
PROBLEMS = {
    "400": "The request cannot be read.",
    "401": "A token is needed, or this one is not valid.",
    "403": "The token lacks the scope, or the request came from another site.",
    "404": "There is no such job, task, queue or worker; names that are close are suggested.",
    "409": "It is in a state in which this cannot be done; the problem says which.",
    "413": "The body is too large.",
    "415": "The body is not JSON by its type.",
    "422": "A value is not valid or cannot be stored; the problem says which, and the cure.",
    "429": "Too many requests; `Retry-After` says when to come again.",
    "503": "The ledger is away. Try again: `Retry-After` says when.",
    "default": "Anything else that went wrong, told like every other problem.",
}
EVERYWHERE = ("400", "401", "403", "422", "429", "503", "default")
WITH_BODY = ("413", "415")
_SECURITY: list[dict[str, list[str]]] = [{"token": []}, {}]
"""Where no token is asked for (see `host`), none is needed."""


def describe(web_app: FastAPI) -> None:
    """Have the door give this document at its usual place."""

    def document() -> dict[str, Any]:
        if web_app.openapi_schema is None:
            web_app.openapi_schema = _completed(
                get_openapi(
                    title=web_app.title,
                    version=web_app.version,
                    description=web_app.description,
                    routes=web_app.routes,
                    tags=[],
                )
            )
        return web_app.openapi_schema

    web_app.openapi = document  # type: ignore[method-assign]


def _completed(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    models = components.setdefault("schemas", {})
    own = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
    models.update(own.pop("$defs", {}))
    models["ProblemDetails"] = own
    # FastAPI's own form of what is not valid, which we do not use.
    for name in ("HTTPValidationError", "ValidationError"):
        models.pop(name, None)
    components["responses"] = {status: _problem(status) for status in PROBLEMS}
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "`unstuck tokens create NAME --scope read`"}
    }
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _complete(path, method, operation)
    return schema


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    if path in OPEN:
        answers["503"] = {"$ref": "#/components/responses/503"}
        return
    statuses = [*EVERYWHERE, *(WITH_BODY if "requestBody" in operation else ())]
    # What is named in the path, in the body or by a condition may not exist; a verb may come at the wrong time.
    statuses.append("404")
    if method != "get":
        statuses.append("409")
    for status in sorted(statuses):
        answers.setdefault(status, {"$ref": f"#/components/responses/{status}"})
    operation.setdefault("security", _SECURITY)


def _problem(status: str) -> dict[str, Any]:
    return {
        "description": PROBLEMS[status],
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
    }
