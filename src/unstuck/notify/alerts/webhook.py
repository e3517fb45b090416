"""Post a signed message: to the address that was checked, with the certificate checked, following nobody."""

import hashlib
import hmac
import http.client
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from unstuck.notify.alerts.addresses import Refused, Resolve, resolve_once
from unstuck.notify.alerts.targets import Delivered, NotDelivered, Outcome, Target
from unstuck.version import VERSION

MAX_ANSWER_BYTES = 4096
DELIVERY = "Unstuck-Delivery"
TIMESTAMP = "Unstuck-Timestamp"
SIGNATURE = "Unstuck-Signature"


def post(
    target: Target,
    facts: dict[str, Any],
    delivery: str,
    *,
    timeout_s: float,
    allow_private: bool,
    resolve: Resolve = socket.getaddrinfo,
    trust: ssl.SSLContext | None = None,
) -> Outcome:
    """Send one message within the timeout and give what became of it."""
    parts = urlsplit(target.url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    body = msgspec.json.encode({"delivery": delivery, "at": time.time(), **facts})
    timestamp = str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"unstuck/{VERSION}",
        DELIVERY: delivery,
        TIMESTAMP: timestamp,
        SIGNATURE: sign(target.secret, timestamp, body),
    }
    context = (trust or ssl.create_default_context()) if secure else None
    deadline_s = time.monotonic() + timeout_s
    try:
        places = resolve_once(host, port, allow_private=allow_private, resolve=resolve)
        connection = _connect(places, host, port, context, deadline_s)
    except Refused as error:
        return NotDelivered(str(error))
    except socket.gaierror:
        return NotDelivered("its name cannot be resolved")
    except ssl.SSLCertVerificationError as error:
        return NotDelivered(f"its certificate is not valid: {error.verify_message}")
    except TimeoutError:
        return NotDelivered(f"it cannot be reached within {timeout_s:g}s")
    except (OSError, UnicodeError) as error:
        return NotDelivered(f"it cannot be reached: {_said(error)}")
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    return _exchange(connection, path, body, headers, deadline_s, timeout_s)


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """Give the signature of a body sent at this time."""
    mac = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"v1={mac.hexdigest()}"


def _connect(
    places: list[tuple[int, tuple[Any, ...]]], host: str, port: int, context: ssl.SSLContext | None, deadline_s: float
) -> http.client.HTTPConnection:
    """Connect to one of the addresses that were checked; the name is used for the certificate and the Host alone."""
    connection = http.client.HTTPConnection(host, port)
    # Else the Host would name a port that nobody wrote.
    connection.default_port = 80 if context is None else 443
    trouble: OSError | None = None
    for family, place in places:
        one = socket.socket(family, socket.SOCK_STREAM)
        try:
            one.settimeout(max(0.001, deadline_s - time.monotonic()))
            one.connect(place)
            if context is not None:
                # Wrapped by hand: the library would connect by the name, and so ask for it again.
                one = context.wrap_socket(one, server_hostname=host)
            connection.sock = one
            return connection
        except OSError as error:
            one.close()
            trouble = error
    assert trouble is not None
    raise trouble


def _exchange(
    connection: http.client.HTTPConnection,
    path: str,
    body: bytes,
    headers: dict[str, str],
    deadline_s: float,
    timeout_s: float,
) -> Outcome:
    # A receiver that sends a byte now and then satisfies every timeout of a socket. This one it does not.
    end = threading.Timer(max(0.0, deadline_s - time.monotonic()), _cut, (connection,))
    end.daemon = True
    end.start()
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read(MAX_ANSWER_BYTES)
    except http.client.InvalidURL:
        return NotDelivered("its URL has characters that no request may have")
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() >= deadline_s or isinstance(error, TimeoutError):
            return NotDelivered(f"it did not answer within {timeout_s:g}s", maybe_arrived=True)
        return NotDelivered(f"it broke off: {_said(error)}", maybe_arrived=True)
    finally:
        end.cancel()
        connection.close()
    if time.monotonic() >= deadline_s:
        # Cut off in the middle of its answer, which the library takes for its end.
        return NotDelivered(f"it did not answer within {timeout_s:g}s", maybe_arrived=True)
    if 200 <= answer.status < 300:
        return Delivered()
    if 300 <= answer.status < 400:
        return NotDelivered(f"it answered {answer.status}: redirects are not followed; name the final address")
    return NotDelivered(f"it answered {answer.status}", maybe_arrived=answer.status >= 500)


def _cut(connection: http.client.HTTPConnection) -> None:
    try:
        connection.sock.shutdown(socket.SHUT_RDWR)
    except (OSError, AttributeError):
        pass


def _said(error: Exception) -> str:
    # Only what the system says: what a library writes into its errors may repeat the address.
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else type(error).__name__
