"""The certificate of ``--https``: for all names of this machine, kept, and made anew when it must be."""

import ssl
from datetime import timedelta

import pytest
from cryptography import x509

from mmserve.demos.placard import certificate as module
from mmserve.demos.placard.certificate import addresses, certificate, names_of_host

NAMES = ("192.168.7.9", "fe80::7", "desk.local", "localhost", "127.0.0.1", "::1")


def named(path):
    found = x509.load_pem_x509_certificate(path.read_bytes())
    return found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_it_names_what_it_is_for_and_goes_with_its_key(tmp_path):
    chain, key = certificate(tmp_path / "https", NAMES)
    names = named(chain)
    assert names.get_values_for_type(x509.DNSName) == ["desk.local", "localhost"]
    assert {str(each) for each in names.get_values_for_type(x509.IPAddress)} == set(NAMES) - {
        "desk.local",
        "localhost",
    }
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)


def test_the_key_is_for_its_owners_eyes_alone(tmp_path):
    _, key = certificate(tmp_path / "https", NAMES)
    assert key.stat().st_mode & 0o077 == 0
    assert key.parent.stat().st_mode & 0o077 == 0


def test_a_good_one_is_kept_so_that_a_visitor_need_not_trust_anew(tmp_path):
    chain, _ = certificate(tmp_path, NAMES)
    first = chain.read_bytes()
    certificate(tmp_path, NAMES[:3])
    assert chain.read_bytes() == first


@pytest.mark.parametrize("spoil", ["another name", "ends soon", "no key", "damaged"])
def test_one_that_will_not_do_is_made_anew(tmp_path, monkeypatch, spoil):
    if spoil == "ends soon":
        monkeypatch.setattr(module, "VALID", timedelta(days=2))
    chain, key = certificate(tmp_path, NAMES)
    first = chain.read_bytes()
    monkeypatch.undo()
    if spoil == "no key":
        key.unlink()
    if spoil == "damaged":
        chain.write_bytes(first[:100])
    wanted = (*NAMES, "new.local") if spoil == "another name" else NAMES
    certificate(tmp_path, wanted)
    assert chain.read_bytes() != first
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)


def test_a_host_is_itself_and_one_that_stands_for_all_is_every_name(monkeypatch):
    assert names_of_host("192.168.7.9") == ("192.168.7.9", "localhost", "127.0.0.1", "::1")
    assert names_of_host("localhost") == ("localhost", "127.0.0.1", "::1")
    monkeypatch.setattr(module.socket, "gethostname", lambda: "desk")
    monkeypatch.setattr(module, "addresses", lambda: ("10.0.0.2",))
    everywhere = names_of_host("0.0.0.0")
    assert {"10.0.0.2", "desk", "desk.local", "localhost", "127.0.0.1", "::1"} == set(everywhere)


def test_addresses_are_numeric_and_none_is_everywhere():
    assert not set(addresses()) & {"0.0.0.0", "::"}
