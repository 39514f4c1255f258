"""Offers and answers: whom packets may go to, and where clients go first."""

import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.live.sources.sdp import (
    MOST_CANDIDATES,
    Unprocessable,
    arranged,
    check_offer,
    guarded,
    may_send_to,
    trickled,
    ufrag,
)

OFFER = (
    "v=0\r\no=- 1 1 IN IP4 0.0.0.0\r\ns=-\r\nt=0 0\r\nm=video 9 UDP/TLS/RTP/SAVPF 96\r\na=ice-ufrag:abcd\r\n"
)


def candidate(host, port=50000, transport="udp", component=1, kind="host"):
    return f"1 {component} {transport} 2130706431 {host} {port} typ {kind}"


@pytest.mark.parametrize("host", ["93.184.216.34", "2606:2800:220:1::1"])
def test_public_addresses_are_believed(host):
    assert may_send_to(candidate(host), allow_private=False)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "10.0.0.1",
            "192.168.1.7",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "255.255.255.255",
        ),
        *("224.0.0.1", "::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "2002:a00:1::", "ff02::1"),
        *("b1a2c3d4.local", "localhost", "example.org", "", "1.2.3"),
    ],
)
def test_private_addresses_and_names_are_not(host):
    assert not may_send_to(candidate(host), allow_private=False)


@pytest.mark.parametrize("host", ["224.0.0.1", "0.0.0.0", "x.local", "ff02::1"])
def test_some_are_not_even_where_private_ones_are(host):
    assert not may_send_to(candidate(host), allow_private=True)
    assert may_send_to(candidate("192.168.1.7"), allow_private=True)


@pytest.mark.parametrize(
    "value",
    [
        candidate("93.184.216.34", port=53),
        candidate("93.184.216.34", port=70000),
        candidate("93.184.216.34", transport="tcp"),
        candidate("93.184.216.34", component=2),
        "1 1 udp 1",
        "",
    ],
)
def test_services_and_what_is_no_candidate_of_ours_are_not(value):
    assert not may_send_to(value, allow_private=True)


def test_an_offer_keeps_few_candidates_and_never_their_end():
    hosts = [f"93.184.216.{i}" for i in range(1, 40)]
    lines = [f"a=candidate:{candidate(host)}" for host in ("10.0.0.1", "x.local", *hosts)]
    kept = guarded(OFFER + "\r\n".join([*lines, "a=end-of-candidates"]) + "\r\n", allow_private=False)
    assert kept.count("a=candidate:") == MOST_CANDIDATES
    assert "end-of-candidates" not in kept
    assert "10.0.0.1" not in kept
    assert ".local" not in kept
    assert "a=ice-ufrag:abcd" in kept


def test_what_is_no_offer_of_video_is_refused():
    check_offer(OFFER)
    for wrong in ("", "hello", OFFER + "x" * 70_000, OFFER + "m=audio 9 RTP 0\r\n" * 8):
        with pytest.raises(InvalidRequest):
            check_offer(wrong)
    with pytest.raises(Unprocessable, match="no video"):
        check_offer(OFFER.replace("m=video", "m=audio"))


def test_fragments_hold_candidates():
    fragment = (
        f"a=ice-ufrag:abcd\r\nm=video 9 RTP 0\r\na=mid:0\r\na=candidate:{candidate('93.184.216.34')}\r\n"
    )
    assert trickled(fragment) == (candidate("93.184.216.34"),)
    assert ufrag(fragment) == "abcd"
    assert ufrag("m=video 9 RTP 0") is None


# ---------------------------------------------------------------- answers

HOSTS = ["2606:2800:220:1::1", "127.0.0.1", "10.0.0.5", "192.168.1.9"]
ANSWER = "\r\n".join(
    [
        *("v=0", "s=-", "m=video 4000 UDP/TLS/RTP/SAVPF 96", f"c=IN IP6 {HOSTS[0]}", "a=mid:0"),
        *(f"a=candidate:{i} 1 udp 100 {host} {4000 + i} typ host" for i, host in enumerate(HOSTS)),
        *("a=end-of-candidates", "a=setup:active", ""),
    ]
)


def hosts(answer):
    return [line.split()[4] for line in answer.splitlines() if line.startswith("a=candidate")]


def test_ipv4_is_offered_first_and_loopback_last():
    assert hosts(arranged(ANSWER, (), None)) == ["10.0.0.5", "192.168.1.9", HOSTS[0], "127.0.0.1"]


def test_the_host_that_was_reached_is_the_first_and_the_section_s_own():
    lines = arranged(ANSWER, ("192.168.1.9",), None).splitlines()
    assert hosts("\r\n".join(lines))[0] == "192.168.1.9"
    assert "c=IN IP4 192.168.1.9" in lines
    assert "m=video 4003 UDP/TLS/RTP/SAVPF 96" in lines
    assert lines[-1] == "a=setup:active"
    assert len(lines) == len(ANSWER.splitlines())


def test_an_announced_address_comes_before_all_at_the_port_of_one_like_it():
    lines = arranged(ANSWER, ("192.168.1.9",), "93.184.216.34").splitlines()
    assert hosts("\r\n".join(lines))[:2] == ["93.184.216.34", "192.168.1.9"]
    assert "m=video 4003 UDP/TLS/RTP/SAVPF 96" in lines
    assert "c=IN IP4 93.184.216.34" in lines
