"""What is changed in offers and answers: where packets may go, and where clients should go first.

An offer's candidates make this server send packets to addresses that a stranger names. So few are believed,
and none that is a name or private, unless that is allowed. A client that is not believed connects all the
same when it reaches us: ICE learns its address from its own checks, which know a secret of the answer's.
"""

import ipaddress
from collections.abc import Iterable, Sequence

from mmserve.core.errors import InvalidRequest
from mmserve.preprocess.address import is_public

MOST_CHARS = 1 << 16  # of an offer
MOST_SECTIONS = 8
MOST_CANDIDATES = 8  # of a client's that are believed
LEAST_PORT = 1024  # below it are services, and hardly ever clients
CANDIDATE, END = "a=candidate:", "a=end-of-candidates"
UNREADABLE = "invalid_sdp"


class Unprocessable(InvalidRequest):
    """The offer can be read, but there is nothing in it that could be answered."""

    status = 422
    code = "unsupported_offer"


def check_offer(offer: str) -> None:
    """InvalidRequest for what is no offer of video."""
    lines = offer.splitlines()
    if len(offer) > MOST_CHARS or not lines or lines[0].strip() != "v=0":
        raise InvalidRequest("the body is not an SDP offer", code=UNREADABLE)
    sections = [line for line in lines if line.startswith("m=")]
    if len(sections) > MOST_SECTIONS:
        raise InvalidRequest(f"the offer has more than {MOST_SECTIONS} media sections", code=UNREADABLE)
    if not any(line.startswith("m=video") for line in sections):
        raise Unprocessable("the offer has no video")


def guarded(offer: str, allow_private: bool) -> str:
    """``offer`` with those candidates alone that may be sent to. More may come, so none is the last."""
    kept, left = [], MOST_CANDIDATES
    for line in offer.splitlines():
        if line.startswith(CANDIDATE):
            if not left or not may_send_to(line[len(CANDIDATE) :], allow_private):
                continue
            left -= 1
        if not line.startswith(END):
            kept.append(line)
    return "\r\n".join(kept) + "\r\n"


def may_send_to(candidate: str, allow_private: bool) -> bool:
    """Whether ``candidate``, the value of its line, is a numeric address that packets may go to."""
    fields = candidate.split()
    if len(fields) < 8 or fields[1] != "1" or fields[2].lower() != "udp" or fields[6] != "typ":
        return False
    try:
        address, port = ipaddress.ip_address(fields[4]), int(fields[5])
    except ValueError:  # names of mDNS among them
        return False
    if address.is_multicast or address.is_unspecified or not LEAST_PORT <= port < 1 << 16:
        return False
    return allow_private or is_public(address)


def trickled(fragment: str) -> tuple[str, ...]:
    """The candidates of an SDP fragment (RFC 8840), as the values of their lines."""
    if len(fragment) > MOST_CHARS:
        raise InvalidRequest("the fragment is too long", code=UNREADABLE)
    return tuple(line[len(CANDIDATE) :] for line in fragment.splitlines() if line.startswith(CANDIDATE))


def ufrag(sdp: str) -> str | None:
    """The ICE user fragment that stands first in ``sdp``."""
    found = (line.partition(":")[2].strip() for line in sdp.splitlines() if line.startswith("a=ice-ufrag:"))
    return next(found, None)


# ---------------------------------------------------------------- answers


def arranged(answer: str, first: Sequence[str], announce: str | None) -> str:
    """``answer`` with the candidates at ``first`` before the others, IPv4 before IPv6 and loopback last.

    Some clients take the first and no other. What is on its first place is the section's own address, too.
    ``announce`` is put before all, with the port of the first.
    """
    sections: list[list[str]] = [[]]
    for line in answer.splitlines():
        if line.startswith("m="):
            sections.append([])
        sections[-1].append(line)
    lines = sections[0] + [line for section in sections[1:] for line in _arranged(section, first, announce)]
    return "\r\n".join(lines) + "\r\n"


def _arranged(section: list[str], first: Sequence[str], announce: str | None) -> list[str]:
    candidates = sorted(
        (line for line in section if line.startswith(CANDIDATE)), key=lambda line: _rank(line, first)
    )
    if not candidates:
        return section
    if announce is not None:
        candidates.insert(0, _moved(candidates, announce))
    where = next(i for i, line in enumerate(section) if line.startswith(CANDIDATE))
    rest = [line for line in section if not line.startswith(CANDIDATE)]
    lines = rest[:where] + candidates + rest[where:]
    return [_addressed(line, candidates[0].split()) for line in lines]


def _rank(line: str, first: Sequence[str]) -> tuple[int, bool, bool]:
    host = line.split()[4]
    address = ipaddress.ip_address(host)
    return (first.index(host) if host in first else len(first), address.is_loopback, address.version == 6)


def _moved(candidates: Iterable[str], announce: str) -> str:
    """The first candidate of the same kind of address, as if it stood at ``announce``."""
    version = ipaddress.ip_address(announce).version
    lines = [line.split() for line in candidates]
    same = [fields for fields in lines if ipaddress.ip_address(fields[4]).version == version]
    fields = list((same or lines)[0])
    fields[0], fields[4] = f"{CANDIDATE}announced", announce
    return " ".join(fields)


def _addressed(line: str, first: Sequence[str]) -> str:
    """A section's own address and port are those of its ``first`` candidate."""
    host, port = first[4], first[5]
    if line.startswith("c="):
        return f"c=IN IP{ipaddress.ip_address(host).version} {host}"
    if line.startswith("m="):
        kind, _, rest = line.split(" ", 2)
        return f"{kind} {port} {rest}"
    return line
