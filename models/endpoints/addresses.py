"""Addresses to which completions may be sent: configured hosts, resolved and checked once."""

import asyncio
import difflib
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpx

from rheostat.infra.errors import BadInput

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PORTS = {"http": 80, "https": 443}
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
METADATA = tuple(
    ipaddress.ip_address(text)
    for text in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "fd00:ec2::254")
)
"""Addresses of cloud metadata services, which hand out credentials. They are never valid endpoints."""


@dataclass(frozen=True, slots=True)
class ResolvedEndpoint:
    """Endpoint whose URL has been parsed and whose host the configuration allows. The host is resolved later."""

    scheme: str
    host: str
    """Host of the URL in lower case. An IPv6 address has no brackets."""
    port: int
    path: str
    """Path of the URL without a trailing `/`."""
    allow_private: bool
    """Whether the host may have a private IP address."""

    @property
    def authority(self) -> str:
        """Host and port in the format of the Host header."""
        host = _add_brackets(self.host)
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse_endpoint(base_url: str, allowed_hosts: Sequence[str], *, allow_private: bool) -> ResolvedEndpoint:
    """Parse a URL and check that its host is allowed. No name server is queried.

    Raises BadInput if the URL is invalid, its host is not allowed, or it uses http without `allow_private`.
    """
    parts = _split_url(base_url)
    host, port = _read_host(parts, base_url), parts.port or PORTS[parts.scheme]
    allowed = [_parse_allowed_host(entry) for entry in allowed_hosts]
    if (host, port) not in allowed and (host, None) not in allowed:
        near = difflib.get_close_matches(parts.netloc.lower(), allowed_hosts, n=1, cutoff=0)
        raise BadInput(
            f"endpoint {base_url!r}: {_add_brackets(host)}:{port} is not listed in allowed_hosts. Add it there, or "
            f"correct base_url; did you mean {near[0]!r}?"
        )
    if parts.scheme == "http" and not allow_private:
        raise BadInput(
            f"endpoint {base_url!r}: plain http is only allowed for private addresses and with allow_private = true. "
            "Use https."
        )
    return ResolvedEndpoint(
        scheme=parts.scheme, host=host, port=port, path=parts.path.rstrip("/"), allow_private=allow_private
    )


def resolve(endpoint: ResolvedEndpoint) -> tuple[str, ...]:
    """Resolve the host of an endpoint and check its addresses.

    Raises BadInput if an address is not allowed, and OSError if the host cannot be resolved.
    """
    entries = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))
    for address in addresses:
        fault = _find_fault(_unwrap_address(ipaddress.ip_address(address)), endpoint)
        if fault:
            raise BadInput(f"endpoint {endpoint}: {endpoint.host} resolves to {address}, {fault}")
    return addresses


class PinnedTransport(httpx.AsyncBaseTransport):
    """HTTP transport that always connects to the IP addresses that were resolved at the first request. A later answer
    of a name server therefore cannot redirect requests (DNS rebinding). Raises BadInput if an address is not allowed.

    The request extension `attempt`, counted from 0, selects one of the addresses.
    """

    def __init__(self, endpoint: ResolvedEndpoint, *, connections: int) -> None:
        self._endpoint = endpoint
        self._addresses: tuple[str, ...] = ()
        self._resolving = asyncio.Lock()
        self._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=connections))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to one of the pinned addresses. Raises ConnectError if the host cannot be resolved."""
        addresses = await self._resolve_once()
        address = addresses[request.extensions["attempt"] % len(addresses)]
        request.url = request.url.copy_with(host=address)
        # The certificate is checked against the host name, although the connection uses the address.
        request.extensions = {**request.extensions, "sni_hostname": self._endpoint.host}
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections of the transport."""
        await self._transport.aclose()

    async def _resolve_once(self) -> tuple[str, ...]:
        """Return the addresses of the endpoint, resolving them at the first call."""
        async with self._resolving:
            if not self._addresses:
                try:
                    self._addresses = await asyncio.to_thread(resolve, self._endpoint)
                except OSError as error:
                    raise httpx.ConnectError(f"{self._endpoint.host} cannot be resolved: {error}") from error
            return self._addresses


def _split_url(base_url: str) -> SplitResult:
    """Split a URL. Raises BadInput if it is not a plain URL with the scheme http or https."""
    try:
        parts = urlsplit(base_url)
        _ = parts.port
    except ValueError as error:
        raise BadInput(
            f"endpoint: base_url is not a valid URL ({error}). Write it like https://judge.example.com/v1"
        ) from None
    if parts.username is not None or parts.password is not None:  # the URL is not shown because it contains a secret
        raise BadInput(
            "endpoint: base_url contains a user name or password. Put the key into api_key_variable instead."
        )
    if parts.scheme not in PORTS:
        raise BadInput(
            f"endpoint {base_url!r}: base_url must start with https:// or http://, but its scheme is {parts.scheme!r}"
        )
    if parts.query or parts.fragment or not re.fullmatch(r"[\w./~-]*", parts.path, re.ASCII) or base_url[-1:] in "?#":
        raise BadInput(
            f"endpoint {base_url!r}: the path of base_url may only contain letters, digits and . _ ~ / -, without a "
            "query (?) or a fragment (#). Write a plain path such as /v1"
        )
    return parts


def _read_host(parts: SplitResult, base_url: str) -> str:
    """Return the normalized host of a URL. Raises BadInput if it is neither an ASCII host name nor an address."""
    host = (parts.hostname or "").rstrip(".")
    if "[" in parts.netloc:
        if "%" not in host:
            return str(ipaddress.IPv6Address(host))
    elif re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host):
        return host
    raise BadInput(
        f"endpoint {base_url!r}: the host must be an ASCII name or an IP address, found {parts.hostname!r}. Write "
        "international names in punycode (xn--…)"
    )


def _parse_allowed_host(entry: str) -> tuple[str, int | None]:
    """Parse an entry of `allowed_hosts` into host and port. Raises BadInput if the entry is invalid."""
    try:
        parts = urlsplit(f"//{entry}")
        if parts.netloc == entry and parts.username is None:
            return _read_host(parts, entry), parts.port
    except ValueError:
        pass
    raise BadInput(
        f"allowed_hosts: each entry must be `host` or `host:port`, found {entry!r}. Remove the scheme and the path"
    )


def _unwrap_address(address: Address) -> Address:
    """Return the IPv4 address that is embedded in an IPv6 address, or the address itself if there is none."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def _find_fault(address: Address, endpoint: ResolvedEndpoint) -> str:
    """Return the reason why nothing may be sent to an IP address, or an empty string if the address is allowed."""
    if address in METADATA:
        return "the metadata service of a cloud, which is never allowed. Set base_url to another host."
    if address.is_multicast or address.is_unspecified or (address.is_reserved and not address.is_loopback):
        return "which is not the address of a single machine. Correct base_url, or the name server's entry."
    private = not address.is_global or getattr(address, "is_site_local", False)
    if private and not endpoint.allow_private:
        return "a private, loopback or link-local address. Set allow_private = true if this is intended."
    if endpoint.scheme == "http" and not private:
        return "a public address, to which plain http is not allowed. Use https."
    return ""


def _add_brackets(host: str) -> str:
    """Return the host as it is written in a URL, which is with brackets if it is an IPv6 address."""
    return f"[{host}]" if ":" in host else host
