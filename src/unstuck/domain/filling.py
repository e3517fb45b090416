"""Write nodes of workflows as plain calls, for workers of other languages: with the results that they wait for."""

from typing import Any

import msgspec

from unstuck.domain.inputs import ALL, ERROR_KEY, NodeError, unpack_raw
from unstuck.domain.payload import decode_call, put_results

MISSING = NodeError(code="RESULT_NOT_AVAILABLE", message="Its result is not there any more")


def with_results(payload: bytes, inputs: bytes) -> dict[str, Any]:
    """Give both members of the call, so that no language needs to know of references. What did not succeed stands
    there as `{"$error": {"code": ..., ...}}`, in lists too. Results are `msgspec.Raw`: JSON, and never built here."""
    call = decode_call(payload)
    found = unpack_raw(inputs)
    instead = found.get(ALL, MISSING)
    put_results(call, {place: plain(found.get(place, instead)) for _, place in call.refs})
    return {"args": call.args, "kwargs": call.kwargs}


def plain(value: Any) -> Any:
    match value:
        case NodeError():
            return {ERROR_KEY: msgspec.to_builtins(value)}
        case list():
            return [plain(one) for one in value]
    return value
