"""Endpoints are reached only at allowed hosts with allowed addresses; refused URLs are in tests/unit/refusals."""

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.endpoints.addresses import parse_endpoint, resolve


def parse_allowed(url, *allowed_hosts, allow_private=False):
    return parse_endpoint(url, allowed_hosts or ("judge.example.com",), allow_private=allow_private)


def resolve_host(host, *, scheme="https", allow_private=False):
    return resolve(parse_allowed(f"{scheme}://{host}/v1", host, allow_private=allow_private))


@pytest.mark.parametrize(
    ("url", "allowed_host", "normal", "authority"),
    [
        ("https://judge.example.com/v1", "judge.example.com", "https://judge.example.com/v1", "judge.example.com"),
        ("https://JUDGE.example.com:443/v1/", "judge.example.com", "https://judge.example.com/v1", "judge.example.com"),
        ("https://judge.example.com.:8443", "judge.example.com", "https://judge.example.com:8443", None),
        ("https://judge.example.com:8443", "judge.example.com:8443", "https://judge.example.com:8443", None),
    ],
)
def test_the_url_of_an_allowed_host_is_normalized(url, allowed_host, normal, authority):
    endpoint = parse_allowed(url, allowed_host)
    assert (str(endpoint), endpoint.authority) == (normal, authority or "judge.example.com:8443")


def test_a_password_in_the_url_is_refused_and_not_repeated_in_the_message():
    with pytest.raises(BadInput, match="api_key_variable") as refused:
        parse_allowed("https://user:canary@judge.example.com/v1")
    assert "canary" not in str(refused.value)


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.7.7", "100.64.0.1",
    "[::1]", "[fd00::1]", "[fe80::1]", "[fec0::1]",
    "[::ffff:10.0.0.1]", "[::ffff:127.0.0.1]", "[64:ff9b::10.0.0.1]", "[2002:a00:1::1]",
    "localhost", "2130706433", "0x7f.1",  # the C library reads both numbers as 127.0.0.1
]  # fmt: skip
FORBIDDEN = [
    "169.254.169.254", "100.100.100.200", "192.0.0.192", "[fd00:ec2::254]",
    "[::ffff:169.254.169.254]", "[64:ff9b::169.254.169.254]",
    "224.0.0.1", "[ff02::1]", "0.0.0.0", "[::]", "255.255.255.255", "240.0.0.1", "[::127.0.0.1]",
]  # fmt: skip
"""Metadata services of clouds, and addresses of no single machine."""
PUBLIC = ["8.8.8.8", "[2001:4860:4860::8888]", "[::ffff:8.8.8.8]", "[64:ff9b::8.8.8.8]"]


@pytest.mark.parametrize("host", PRIVATE)
def test_a_private_address_needs_allow_private(host):
    with pytest.raises(BadInput, match="allow_private"):
        resolve_host(host)
    assert resolve_host(host, scheme="http", allow_private=True)


@pytest.mark.parametrize("host", FORBIDDEN)
@pytest.mark.parametrize("allow_private", [False, True])
def test_metadata_services_and_addresses_of_no_single_machine_are_always_refused(host, allow_private):
    with pytest.raises(BadInput, match=r"metadata|single machine"):
        resolve_host(host, allow_private=allow_private)


@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_address_needs_https(host):
    assert len(resolve_host(host)) == 1
    with pytest.raises(BadInput, match="https"):
        resolve_host(host, scheme="http", allow_private=True)
