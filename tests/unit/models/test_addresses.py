"""Where completions may be sent."""

import socket

import pytest

from infra.errors import BadInput
from models.endpoints.addresses import parse_endpoint, resolve


def endpoint_of(url, *allowed, allow_private=False):
    return parse_endpoint(url, allowed or ("judge.example.com",), allow_private=allow_private)


@pytest.mark.parametrize(
    ("url", "shown", "authority"),
    [
        ("https://judge.example.com/v1", "https://judge.example.com/v1", "judge.example.com"),
        ("https://JUDGE.example.com:443/v1/", "https://judge.example.com/v1", "judge.example.com"),
        ("https://judge.example.com.:8443", "https://judge.example.com:8443", "judge.example.com:8443"),
    ],
)
def test_an_allowed_host_is_taken(url, shown, authority):
    endpoint = endpoint_of(url)
    assert (str(endpoint), endpoint.authority) == (shown, authority)


def test_a_host_that_is_not_allowed_is_refused_with_the_nearest_one():
    with pytest.raises(
        BadInput, match=r"judge\.example\.org:443 is not in allowed_hosts; nearest: 'judge\.example\.com'"
    ):
        endpoint_of("https://judge.example.org/v1", "other.net", "judge.example.com")


def test_an_entry_with_a_port_allows_that_port_alone():
    assert endpoint_of("https://judge.example.com:8443/v1", "judge.example.com:8443").port == 8443
    with pytest.raises(BadInput, match="not in allowed_hosts"):
        endpoint_of("https://judge.example.com/v1", "judge.example.com:8443")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://judge.example.com/v1#part", "fragment"),
        ("https://judge.example.com/v1?key=x", "query"),
        ("https://judge.example.com/v1?", "query"),
        ("ftp://judge.example.com/v1", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("judge.example.com/v1", "scheme"),
        ("http://judge.example.com/v1", "https"),
        ("https://judge.example.com:99999/v1", "base_url"),
        ("https://[::1/v1", "base_url"),
        ("https:///v1", "host name"),
        ("https://judge.example.com\\@evil.net/v1", "user name"),
        ("https://judge。example.com/v1", "ASCII"),
        ("https://jüdge.example.com/v1", "ASCII"),
        ("https://judge.example.com/v1/%2e%2e/", "path"),
        ("https://judge.example.com/v1 HTTP/1.1", "path"),
    ],
)
def test_an_odd_url_is_refused(url, reason):
    with pytest.raises(BadInput, match=reason):
        endpoint_of(url)


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(BadInput, match="api_key_variable") as caught:
        endpoint_of("https://user:canary@judge.example.com/v1")
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("entry", ["https://judge.example.com", "a@b", "judge.example.com/v1", "", "[::1", "x:port"])
def test_an_entry_that_is_no_host_is_refused(entry):
    with pytest.raises(BadInput, match="allowed_hosts"):
        endpoint_of("https://judge.example.com/v1", "judge.example.com", entry)


PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.7.7",
    "100.64.0.1",
    "[::1]",
    "[fd00::1]",
    "[fe80::1]",
    "[fec0::1]",
    "[::ffff:10.0.0.1]",
    "[::ffff:127.0.0.1]",
    "[64:ff9b::10.0.0.1]",
    "[2002:a00:1::1]",
    "localhost",
    "2130706433",  # 127.0.0.1, as the C library reads it
    "0x7f.1",
]


@pytest.mark.parametrize("host", PRIVATE)
def test_a_private_address_is_refused_unless_it_is_meant(host):
    with pytest.raises(BadInput, match="allow_private"):
        resolve(endpoint_of(f"https://{host}/v1", host))
    assert resolve(endpoint_of(f"http://{host}/v1", host, allow_private=True))


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "100.100.100.200",
        "192.0.0.192",
        "[fd00:ec2::254]",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::169.254.169.254]",
        "224.0.0.1",
        "[ff02::1]",
        "0.0.0.0",
        "[::]",
        "255.255.255.255",
        "240.0.0.1",
        "[::127.0.0.1]",
    ],
)
@pytest.mark.parametrize("allow_private", [False, True])
def test_metadata_services_and_what_is_no_machine_are_never_asked(host, allow_private):
    with pytest.raises(BadInput, match=r"metadata|single machine"):
        resolve(endpoint_of(f"https://{host}/v1", host, allow_private=allow_private))


@pytest.mark.parametrize("host", ["8.8.8.8", "[2001:4860:4860::8888]", "[::ffff:8.8.8.8]", "[64:ff9b::8.8.8.8]"])
def test_a_public_address_needs_https(host):
    assert len(resolve(endpoint_of(f"https://{host}/v1", host))) == 1
    with pytest.raises(BadInput, match="needs https"):
        resolve(endpoint_of(f"http://{host}/v1", host, allow_private=True))


def test_a_name_that_does_not_resolve_is_no_bad_input():
    with pytest.raises(socket.gaierror):
        resolve(endpoint_of("https://nowhere.invalid/v1", "nowhere.invalid"))
