"""Post a signed message as JSON: certificates are verified, redirects are not followed."""

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
    trust: ssl.SSLContext | None = None,
) -> Outcome:
    """Send one message within the timeout and return what became of it."""
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
    connection = (
        http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trust or ssl.create_default_context())
        if secure
        else http.client.HTTPConnection(host, port, timeout=timeout_s)
    )
    deadline_s = time.monotonic() + timeout_s
    try:
        connection.connect()
        if time.monotonic() >= deadline_s:
            # The timeout of a socket is for one address; a name can have several.
            connection.close()
            raise TimeoutError
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
