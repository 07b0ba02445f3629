"""What texts settings may be. A check says what is wrong with a text, as "must be …", or None."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from node.errors import SwarmKeyError
from node.log_levels import parse_levels
from node.settings.kinds import Check, Text
from node.settings.toml_text import toml_text
from node.swarm_key import SwarmKey


def choice(*values: str) -> Text:
    """The kind of a setting that is one of these words."""
    quoted = [toml_text(value) for value in values]
    form = " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))
    return Text(form, lambda text: None if text in values else f"must be {form}")


def matching(pattern: str, form: str) -> Check:
    """A check for texts that match a pattern as a whole; ``form`` says in words what these are."""
    return lambda text: None if re.fullmatch(pattern, text) else f"must be {form}"


NAME_FORM = "1 to 63 letters, digits, dots, hyphens and underscores, a letter or digit first"
name_check = matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", NAME_FORM)


def or_empty(check: Check) -> Check:
    """A check that lets an empty text pass as well."""
    return lambda text: check(text) if text else None


def path_check(text: str) -> str | None:
    """The check of a path, which need not exist."""
    return "must be a path, without control characters" if re.search(r"[\x00-\x1f\x7f]", text) else None


HOST_FORM = '"lan", "loopback" or an IP address of this machine'


def host_check(text: str) -> str | None:
    """The check of where a node listens."""
    return None if text in ("lan", "loopback") or _is_address(text) else f"must be {HOST_FORM}"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


_HOST_NAME = r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})"
ADDRESS_FORM = "host, host:port or [IPv6 address]:port"


def address_check(text: str) -> str | None:
    """The check of a name or address, with a port or without."""
    found = re.fullmatch(rf"(?:\[(?P<v6>[^\]]+)\]|(?P<name>{_HOST_NAME}))(?::(?P<port>[0-9]{{1,5}}))?", text)
    if found and (found["v6"] is None or _is_address(found["v6"])) and 1 <= int(found["port"] or 1) <= 65535:
        return None
    return None if _is_address(text) else f"must be {ADDRESS_FORM}"


ORIGIN_FORM = "http://host, https://host or the same with :port, as browsers send it"


def with_port(place: str, port: int) -> str:
    """host:port of a checked host, host:port, [IPv6 address]:port or bare IPv6 address."""
    if _is_address(place) and ":" in place:
        return f"[{place}]:{port}"
    return place if re.search(r":[0-9]+$", place) and not place.endswith("]") else f"{place}:{port}"


def origin_check(text: str) -> str | None:
    """The check of a web page's origin."""
    parts = urlsplit(text)
    simple = not (parts.path or parts.query or parts.fragment or parts.username)
    if simple and parts.scheme in ("http", "https") and parts.netloc and address_check(parts.netloc) is None:
        return None
    if text == "*":
        return "is every page of the internet; name the origins that may use this node"
    return f"must be {ORIGIN_FORM}"


def log_levels_check(text: str) -> str | None:
    """The check of levels by name."""
    try:
        parse_levels(text)
    except ValueError as error:
        return str(error)
    return None


def swarm_key_check(text: str) -> str | None:
    """The check of a swarm key, which says nothing of the text."""
    try:
        SwarmKey.parse(text)
    except SwarmKeyError as error:
        return error.message
    return None


API_KEY_FORM = "8 to 256 visible ASCII characters"
INTERFACE_FORM = "names of network interfaces, or patterns such as br-*"
interface_check = matching(r"[A-Za-z0-9._:@*?-]{1,64}", INTERFACE_FORM)

_OURS = "is set by swarm-node itself"
# llama-server's flags that would take a node's safety or the swarm itself apart, or that have a setting of their own.
_RESERVED = {
    **dict.fromkeys(("-m", "--model", "-mu", "--model-url", "-dr", "--docker-repo"), _OURS),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"), _OURS),
    **dict.fromkeys(("--host", "--port", "--reuse-port", "--api-key", "--api-key-file"), _OURS),
    **dict.fromkeys(("-ot", "--override-tensor", "--rpc"), _OURS),
    **dict.fromkeys(("-c", "--ctx-size"), "is the setting [model] context_tokens"),
    **dict.fromkeys(("-np", "--parallel"), "is the setting [model] parallel"),
    **dict.fromkeys(("-ub", "--ubatch-size"), "is the setting [model] ubatch_tokens"),
    **dict.fromkeys(("-cram", "--cache-ram"), "is the setting [model] prompt_cache_mib"),
    **dict.fromkeys(("-t", "--threads"), "is the setting [router] threads"),
}


def llama_argument_check(text: str) -> str | None:
    """The check of one argument for llama-server."""
    flag = text.split("=", 1)[0]
    # llama.cpp reads an underscore in a long flag as a hyphen.
    return _RESERVED.get(flag.replace("_", "-") if flag.startswith("--") else flag)
