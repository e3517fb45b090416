"""Find out where a webhook leads, once, and refuse what is not out in the open."""

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

Resolve = Callable[..., list[Any]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_ADDRESSES = 4
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""How a network without IPv4 reaches all of it: public as far as what is inside."""
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_SPECIAL = (
    # A cloud's public address for what only the machine itself may ask.
    ipaddress.ip_network("168.63.129.16/32"),
    # What older versions of Python take for public.
    ipaddress.ip_network("192.0.0.0/24"),
    ipaddress.ip_network("64:ff9b:1::/48"),
    # Documentation (RFC 9637) and segment routing (RFC 9602).
    ipaddress.ip_network("3fff::/20"),
    ipaddress.ip_network("5f00::/16"),
)
_OPEN_IPV6 = ipaddress.IPv6Network("2000::/3")
"""All that is ever given out for the internet; site-local addresses (fec0::/10) and the rest are outside of it."""


class Refused(Exception):
    """An address that webhooks must not lead to."""


def resolve_once(
    host: str, port: int, *, allow_private: bool, resolve: Resolve = socket.getaddrinfo
) -> list[tuple[int, tuple[Any, ...]]]:
    """Give the (family, socket address) pairs to connect to. All of them are checked, and nobody asks again: a name
    that leads elsewhere a moment later leads us nowhere."""
    found = resolve(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    places = [(int(family), place) for family, _, _, _, place in found if family in (socket.AF_INET, socket.AF_INET6)]
    if not places:
        raise OSError("the name has no address")
    for _, place in places:
        if not allow_private and not is_public(str(place[0])):
            raise Refused(
                "it leads to a private, loopback, link-local or otherwise special address. Set alerts.allow_private = "
                "true if it is meant to"
            )
    return places[:MAX_ADDRESSES]


def is_public(text: str) -> bool:
    """Say whether an address belongs to the open internet, whatever it is wrapped in."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address in _NAT64:
        return _is_open(_last_four(address))
    return all(_is_open(one) for one in (address, *_inside(address)))


def _is_open(address: Address) -> bool:
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None and address not in _OPEN_IPV6:
        return False
    return not any(address in network for network in _SPECIAL)


def _inside(address: Address) -> list[Address]:
    """Give the IPv4 addresses that an IPv6 one stands for."""
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    inner: list[Address] = []
    if address.ipv4_mapped is not None:
        inner.append(address.ipv4_mapped)
    if address.sixtofour is not None:
        inner.append(address.sixtofour)
    if address.teredo is not None:
        inner += address.teredo
    if address in _COMPATIBLE:
        inner.append(_last_four(address))
    return inner


def _last_four(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
