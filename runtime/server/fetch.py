"""Guarded fetch of a client's picture address: no private network, no redirect into one, bounded in bytes and time.

A name is resolved once per hop, every answer must be a global address, and the connection goes to that very address
(with the name in SNI and Host), so a second answer of a hostile name server is never asked for. Runs in a thread;
standard library only; proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from runtime.server.errors import ApiError

MAX_REDIRECTS = 3
MAX_URL_CHARS = 2048
RETRIED = frozenset({404, 425, 429, 500, 502, 503, 504})
PICTURE_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")

Resolve = Callable[[str, int], Sequence[str]]
IsAllowed = Callable[[str], bool]

_EMBEDDED_V4 = (  # IPv6 ranges that carry an IPv4 address or a tunnel, whatever the library calls them
    ipaddress.ip_network("::/96"),
    ipaddress.ip_network("::ffff:0:0/96"),
    ipaddress.ip_network("64:ff9b::/96"),
    ipaddress.ip_network("64:ff9b:1::/48"),
    ipaddress.ip_network("2002::/16"),
    ipaddress.ip_network("2001::/32"),
)


def is_global_address(text: str) -> bool:
    """Whether an address is on the public internet; unparsable, scoped and embedded ones are not."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if address.version == 6 and (address.scope_id or any(address in network for network in _EMBEDDED_V4)):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_private)


def resolve_name(host: str, port: int) -> list[str]:
    """All addresses of a name, in the resolver's order. Raises: OSError."""
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


@dataclass(frozen=True)
class Fetcher:
    """Policy of a fetch. `resolve` and `is_allowed` are what tests replace to reach a server of their own."""

    enabled: bool
    max_bytes: int
    timeout_s: float = 10.0
    retries: int = 2
    retry_pause_s: float = 0.3
    resolve: Resolve = resolve_name
    is_allowed: IsAllowed = is_global_address

    def fetch(self, url: str, where: str) -> bytes:
        """Bytes behind an address, for the request field `where`.

        Raises: ApiError: 400 the address is not allowed or not an address, 413 too large, 422 it cannot be fetched
            (names host, status and type, never the path or the query).
        """
        target = parse_url(url, where)
        if not self.enabled:
            raise ApiError(
                "a url is not allowed as an input of this deployment", where=where, code="url_inputs_disabled",
                expected="an upload or a data: uri",
            )  # fmt: skip
        deadline = time.monotonic() + self.timeout_s
        for attempt in range(self.retries + 1):
            try:
                return self._follow(target, where, deadline)
            except _Unavailable as failure:
                pause_s = self.retry_pause_s * 2**attempt
                if attempt == self.retries or time.monotonic() + pause_s > deadline:
                    raise _cannot_fetch(target, where, str(failure)) from failure
            time.sleep(pause_s)
        raise AssertionError("unreachable")

    def _follow(self, target: SplitResult, where: str, deadline: float) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            addresses = self._addresses(target, where)
            with contextlib.closing(_Connection(target, addresses[0], deadline)) as connection:
                try:
                    with contextlib.closing(_get(connection, target)) as response:
                        if response.status not in (301, 302, 303, 307, 308):
                            return self._read(response, connection, target, where)
                        location = response.getheader("Location", "")
                except (OSError, http.client.HTTPException) as error:
                    raise _Unavailable(type(error).__name__) from error
            target = parse_url(urljoin(target.geturl(), location), where)
        raise _cannot_fetch(target, where, f"more than {MAX_REDIRECTS} redirects")

    def _addresses(self, target: SplitResult, where: str) -> Sequence[str]:
        host = target.hostname or ""
        try:
            addresses = self.resolve(host, _port(target))
        except (OSError, UnicodeError) as error:
            raise _Unavailable("its name does not resolve") from error
        if not addresses or not all(self.is_allowed(address) for address in addresses):
            raise ApiError(
                "this host is not allowed: it is not on the public internet", where=where, code="url_not_allowed",
                found=repr(host[:80]),
            )  # fmt: skip
        return addresses

    def _read(
        self, response: http.client.HTTPResponse, connection: _Connection, target: SplitResult, where: str
    ) -> bytes:
        kind = (
            response.getheader("Content-Type", "application/octet-stream").partition(";")[0].strip().lower()
        )
        if response.status in RETRIED:
            raise _Unavailable(f"status {response.status}, type {kind}")
        if response.status != 200:
            raise _cannot_fetch(target, where, f"status {response.status}, type {kind}")
        if not kind.startswith(PICTURE_TYPES):
            raise _cannot_fetch(target, where, f"status 200, but the format is {kind}, not an image")
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise _cannot_fetch(target, where, "the answer is compressed")
        data = bytearray()
        while chunk := response.read1(64 * 1024):
            data += chunk
            if len(data) > self.max_bytes:
                limit = f"{self.max_bytes} bytes"
                raise ApiError(
                    "the fetched file is too large",
                    status=413,
                    code="file_too_large",
                    where=where,
                    expected=limit,
                )
            if not response.isclosed():  # Python 3.13 closes it with the last byte, and the socket with it
                connection.renew_timeout()
        if response.length:
            raise _Unavailable("the answer was cut off")
        return bytes(data)


class _Unavailable(Exception):
    """This attempt failed in a way that may pass."""


class _Connection(http.client.HTTPConnection):
    """A connection to a pinned address that keeps to one deadline over all its operations."""

    def __init__(self, target: SplitResult, address: str, deadline: float) -> None:
        super().__init__(target.hostname or "", _port(target))
        self._address, self._deadline = address, deadline
        self._is_tls = target.scheme == "https"

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self._remaining())
        if self._is_tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
        self._pinned = self.sock  # http.client drops its own reference once a closing answer has begun

    def renew_timeout(self) -> None:
        self._pinned.settimeout(self._remaining())

    def _remaining(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("out of time")
        return remaining


def _get(connection: _Connection, target: SplitResult) -> http.client.HTTPResponse:
    path = (target.path or "/") + (f"?{target.query}" if target.query else "")
    connection.putrequest("GET", path, skip_accept_encoding=True)
    connection.putheader("Accept", "image/png, image/jpeg, image/webp")
    connection.putheader("User-Agent", "coldframe")
    connection.putheader("Connection", "close")
    connection.endheaders()
    connection.renew_timeout()
    return connection.getresponse()


def parse_url(url: str, where: str) -> SplitResult:
    """An http or https address with a host, without user name. Raises: ApiError 400."""

    def refuse(problem: str) -> ApiError:
        return ApiError(f"this url is not allowed: {problem}", where=where, code="url_not_allowed")

    if len(url) > MAX_URL_CHARS:
        raise refuse(f"it is longer than {MAX_URL_CHARS} characters")
    if any(ord(char) <= 32 or ord(char) == 127 for char in url):
        raise refuse("it holds spaces or control characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refuse("it cannot be parsed") from None
    if parts.scheme not in ("http", "https"):
        raise refuse("its scheme is not http or https")
    if not parts.hostname:
        raise refuse("it has no host")
    if parts.username is not None or parts.password is not None:
        raise refuse("it has a user name")
    if port == 0:
        raise refuse("port 0")
    try:
        parts.hostname.encode("idna")
        parts.path.encode("ascii"), parts.query.encode("ascii")
    except UnicodeError:
        raise refuse("it holds characters that must be percent-encoded") from None
    return parts


def _port(target: SplitResult) -> int:
    return target.port or (443 if target.scheme == "https" else 80)


def _cannot_fetch(target: SplitResult, where: str, problem: str) -> ApiError:
    return ApiError(
        f"the url cannot be fetched: {problem}", status=422, code="fetch_failed", where=where,
        found=repr((target.hostname or "")[:80]),
    )  # fmt: skip
