"""Whom a node serves, judged by what a request says of itself: address, Host, Origin, content type, API key. Pure.

Against web pages (docs/security.md): a page that the user's browser shows can send requests to this machine and its
network. A name of the page's own that it points at a node (DNS rebinding) is caught by the Host, any other page by the
Origin, and what browsers send without asking first (a form, text/plain) by the content type.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_PRIVATE_4: Final = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "127.0.0.0/8",  # loopback
            "10.0.0.0/8",  # RFC 1918
            "172.16.0.0/12",
            "192.168.0.0/16",
            "169.254.0.0/16",  # link-local
            # RFC 6598, between carrier and customer: never routed on the internet, and what overlay networks such as
            # Tailscale number their machines with. A machine that is itself on a carrier's network needs a key.
            "100.64.0.0/10",
        ),
    )
)
_PRIVATE_6: Final = tuple(map(ipaddress.IPv6Network, ("::1/128", "fc00::/7", "fe80::/10")))  # loopback, ULA, link-local
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def is_private(address: str | Address) -> bool:
    """Whether an address is loopback, private, link-local or of a carrier's or overlay network (100.64.0.0/10).

    An IPv4 address within IPv6 (::ffff:a.b.c.d) counts as itself, a zone (%eth0) does not matter. What is no address is
    not private.
    """
    plain = _address(address) if isinstance(address, str) else _unmapped(address)
    if isinstance(plain, ipaddress.IPv4Address):
        return any(plain in network for network in _PRIVATE_4)
    return plain is not None and any(plain in network for network in _PRIVATE_6)


def host_allowed(
    host: str | None,
    *,
    own_names: Collection[str] = (),
    own_addresses: Collection[str] = (),
    allowed_hosts: Collection[str] = (),
) -> bool:
    """Whether a Host header names this node: localhost, a loopback address, one of its own, or an allowed one.

    A name alone stands for every port, `name:port` in `allowed_hosts` for that one. A missing header names nobody.
    """
    wanted = _split(host)
    if wanted is None:
        return False
    name, port = wanted
    address = _address(name)
    if _same_host(name, "localhost") or (address is not None and address.is_loopback):
        return True
    if any(_same_host(name, _unbracketed(own)) for own in (*own_names, *own_addresses)):
        return True
    for entry in allowed_hosts:
        allowed = (_unbracketed(entry), None) if _address(entry) else _split(entry)
        if allowed is not None and _same_host(name, allowed[0]) and allowed[1] in (None, port):
            return True
    return False


def origin_allowed(origin: str | None, *, host: str | None, allowed_origins: Collection[str] = ()) -> bool:
    """Whether a request with this Origin header may be served; `host` is its Host header, which was found allowed.

    No Origin (not a browser, or a plain navigation) is fine; a present one must be that of the node's own pages or an
    allowed one. "null" never is.
    """
    if origin is None:
        return True
    page = _split_origin(origin)
    if page is None:
        return False
    scheme, name, port = page
    own = _split(host)
    if own is not None and _same_host(name, own[0]) and port == (own[1] or _DEFAULT_PORTS[scheme]):
        return True
    return origin_listed(origin, allowed_origins)


def origin_listed(origin: str, allowed_origins: Collection[str]) -> bool:
    """Whether this Origin header is of a page in `allowed_origins`, which may also read what this node answers."""
    page = _split_origin(origin)
    return page is not None and page in map(_split_origin, allowed_origins)


def is_json(content_type: str | None) -> bool:
    """Whether a Content-Type is application/json, with or without parameters. Browsers ask before they send that."""
    return (content_type or "").partition(";")[0].strip().lower() == "application/json"


def api_key_matches(key: str, *, authorization: str | None, x_api_key: str | None) -> bool:
    """Whether a request carries the API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`, in constant time.

    True for every request when `key` is empty: no key is asked for.
    """
    bearer = re.fullmatch(r"[Bb]earer +(\S+) *", authorization or "")
    given = [bearer[1] if bearer else "", x_api_key or ""]
    # Every comparison is made, and on bytes: compare_digest refuses text that is not ASCII.
    matches = [hmac.compare_digest(one.encode("utf-8", "surrogateescape"), key.encode()) for one in given]
    return not key or any(matches)


def _address(text: str) -> Address | None:
    try:
        return _unmapped(ipaddress.ip_address(_unbracketed(text)))
    except ValueError:
        return None


def _unmapped(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address
    return address


def _unbracketed(text: str) -> str:
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _split(host: str | None) -> tuple[str, int | None] | None:
    """Name or address, in lower case and without brackets, and port of a Host header; None if it is not one."""
    found = re.fullmatch(
        r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([\w.-]{1,254}))(?::([0-9]{1,5}))?", host or "", re.ASCII
    )
    if not found:
        return None
    if found[1] and _address(found[1]) is None:
        return None
    return (found[1] or found[2]).lower(), int(found[3]) if found[3] else None


def _split_origin(origin: str) -> tuple[str, str, int] | None:
    """Scheme, name or address, and port of an Origin; None if it is not one of http or https."""
    found = re.fullmatch(r"(https?)://([^/?#@\\]+)", origin.lower(), re.ASCII)
    place = _split(found[2]) if found else None
    if found is None or place is None:
        return None
    return found[1], place[0], place[1] or _DEFAULT_PORTS[found[1]]


def _same_host(one: str, other: str) -> bool:
    """Whether two names or addresses are the same; addresses by value and without zone, names without a final dot."""
    a, b = _address(one), _address(other)
    if a is not None and b is not None:
        return _without_zone(a) == _without_zone(b)
    return one.lower().removesuffix(".") == other.lower().removesuffix(".")


def _without_zone(address: Address) -> str:
    return str(address).partition("%")[0]
