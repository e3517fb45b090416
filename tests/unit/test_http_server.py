"""The socket of the web door: answers go out at once."""

import asyncio
import socket

import pytest

from unstuck.config import Web
from unstuck.domain.errors import ConfigError
from unstuck.http.server import listening_socket


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_body_of_an_answer_does_not_wait_until_its_head_is_confirmed(host: str) -> None:
    """With Nagle's algorithm every answer on a connection that stays open took 40 ms."""
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")

    async def switched_off() -> int:
        answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def visited(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answered.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listening_socket(Web(host=host, port=0)) as listener:
            async with await asyncio.start_server(visited, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                try:
                    return await answered
                finally:
                    writer.close()

    assert asyncio.run(switched_off()) == 1


@pytest.mark.parametrize("host", ["nowhere.invalid", "198.51.100.7"])
def test_an_address_that_is_not_of_this_machine_is_refused_with_its_own_cure(host: str) -> None:
    with pytest.raises(ConfigError, match="--host an address of this machine"):
        listening_socket(Web(host=host, port=0))
