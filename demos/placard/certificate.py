"""A certificate that this machine signs itself, for its own names and addresses, kept for the next start.

Browsers warn of it once; whoever trusts the machine goes on, and has the camera. A certificate of an
authority is better where there is one: then a proxy in front of the server holds it.
"""

import ipaddress
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError

VALID = timedelta(days=365)  # phones believe none that is valid for longer than 825 days
SPARE = timedelta(days=7)  # one that ends within this is made anew
BACKDATED = timedelta(hours=1)  # clocks of visitors may be late
_NOWHERE = ("192.0.2.1", "2001:db8::1")  # for documentation (RFC 5737, RFC 3849); nothing is sent there


def certificate(folder: Path, names: tuple[str, ...]) -> tuple[Path, Path]:
    """The files of a certificate for ``names``, numeric addresses among them, and of its key, made in
    ``folder`` unless a good one is there. ConfigError if the package ``cryptography`` is missing, or the
    folder cannot be used."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError(
            "https needs the package cryptography: pip install 'mmserve[webrtc]' brings it", param="https"
        ) from None
    chain, key = folder / "certificate.pem", folder / "key.pem"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (key.exists() and _good(chain, names)):
            _make(chain, key, names)
    except OSError as error:
        raise ConfigError(f"no certificate can be kept in {folder}: {error}", param="https") from None
    return chain, key


def names_of_host(host: str) -> tuple[str, ...]:
    """What this machine may be called by who reaches it at ``host``: where that stands for all addresses,
    every name and address of it that can be found."""
    loopback = ("localhost", "127.0.0.1", "::1")
    if host not in ("0.0.0.0", "::"):
        return tuple(dict.fromkeys((host, *loopback)))
    name = socket.gethostname()
    names = (name, name if "." in name else f"{name}.local")
    return tuple(dict.fromkeys(name for name in (*addresses(), *names, *loopback) if name.isascii()))


def addresses() -> tuple[str, ...]:
    """The addresses by which this machine would leave for others, of either family."""
    found = []
    for family, target in zip((socket.AF_INET, socket.AF_INET6), _NOWHERE, strict=True):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))  # of a datagram socket: it chooses an address, and sends nothing
                found.append(str(probe.getsockname()[0]))
        except OSError:
            pass
    return tuple(found)


def _good(chain: Path, names: tuple[str, ...]) -> bool:
    """Whether the certificate in a file names all of ``names`` and is valid for a while."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(chain.read_bytes())
        held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    told = {str(name.value) for name in held}
    now = datetime.now(UTC)
    return set(names) <= told and found.not_valid_before_utc <= now < found.not_valid_after_utc - SPARE


def _make(chain: Path, key: Path, names: tuple[str, ...]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    secret = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mmserve placard")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([_named(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(secret, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    _write(key, secret.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    _write(chain, made.public_bytes(pem))


def _named(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, data: bytes) -> None:
    """For the owner's eyes alone, from the first byte on."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
