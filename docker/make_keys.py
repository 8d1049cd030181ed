"""Make what a deployment needs to trust itself: a development CA, a server certificate, node keys and secrets.

The CA is for trying things out: its key lies beside what it signed. Where an authority exists, take its certificates.
"""

import argparse
import contextlib
import datetime
import ipaddress
import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY_DAYS = 3650  # the authority must outlive every certificate that it signs
# this machine, and the names of the two servers in compose.yml
OWN_HOSTS = ("localhost", "127.0.0.1", "::1", "superlink", "proxy")

_NEXT = """Made in {folder}: all is private but what ends in .crt or .pub. Now add to config.toml in FLWR_HOME:

[superlink.fcil]
address = "127.0.0.1:8000"
root-certificates = "{folder}/ca.crt"

and, once the SuperLink runs, let the nodes in:

"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write all files or none, and print how the nodes are registered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="where to write; may exist, but none of the files may")
    host = "name or address that nodes use; may be repeated"
    parser.add_argument("--host", action="append", default=[], type=host_name, help=host)
    parser.add_argument("--nodes", type=int, default=2, help="node keys to make (default 2)")
    parser.add_argument(
        "--days", type=int, default=365, help="days until the server's certificate expires (default 365)"
    )
    given = parser.parse_args(arguments)
    if given.nodes < 0 or given.days < 1:
        parser.error("--nodes must be at least 0 and --days at least 1")
    files = authority_and_server([*OWN_HOSTS, *given.host], given.days) | {"server.secret": new_secret()}
    for node in range(given.nodes):
        files |= node_files(f"node-{node}")
    folder = given.folder.resolve()
    try:
        write_new(folder, files)
    except FileExistsError as error:
        sys.exit(f"{error.filename} exists: nothing was written. Give another folder, or move the old keys away.")
    except OSError as error:
        sys.exit(f"{error.filename or folder} cannot be written: {error.strerror}. Give another folder.")
    print(_NEXT.format(folder=folder), end="")
    for node in range(given.nodes):
        print(f"flwr supernode register {folder}/node-{node}.pub fcil --name node-{node}")


def host_name(text: str) -> str:
    """An IP address as it is, or a host name as certificates have it.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text))
    name, back = "", ""
    with contextlib.suppress(UnicodeError):
        name = text.removesuffix(".").encode("idna").decode()
        back = name.encode().decode("idna")  # not all names survive the old form that Python knows
    lost = back.lower() != text.removesuffix(".").lower()
    if lost or not re.fullmatch(r"([\w-]+\.)*[\w-]*[a-z_-][\w-]*", name, re.ASCII | re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is no host name or IP address; leave out https:// and the port")
    return name


def authority_and_server(hosts: Sequence[str], days: int) -> dict[str, bytes]:
    """A new CA and a server certificate signed by it.

    Args:
        hosts: DNS names and IP addresses that the certificate is valid for.
        days: until the server's certificate expires; that of the authority does in ten years, or as late.

    Returns:
        PEM files by name: ca.crt, ca.key, server.crt, server.key.
    """
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    of_authority = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    ca = (
        _unsigned("fcil development CA", authority.public_key(), max(days, _AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(of_authority, critical=False)
    )
    certificate = (
        _unsigned("fcil server", server.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_alternative_name(h) for h in dict.fromkeys(hosts)]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(of_authority), critical=False)
    )
    pem = serialization.Encoding.PEM
    return {
        "ca.crt": ca.sign(authority, hashes.SHA384()).public_bytes(pem),
        "ca.key": _private(authority, serialization.PrivateFormat.PKCS8),
        "server.crt": certificate.sign(authority, hashes.SHA384()).public_bytes(pem),
        "server.key": _private(server, serialization.PrivateFormat.PKCS8),
    }


def node_files(name: str) -> dict[str, bytes]:
    """A node's key pair in OpenSSH's format, as Flower wants it, and the secret it shares with its SuperExec."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return {
        name: _private(key, serialization.PrivateFormat.OpenSSH),
        f"{name}.pub": key.public_key().public_bytes(*ssh) + b"\n",
        f"{name}.secret": new_secret(),
    }


def new_secret() -> bytes:
    """256 random bits as text."""
    return secrets.token_urlsafe(32).encode()


def write_new(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that do not exist yet, all but certificates and public keys readable by their owner alone.

    Raises:
        FileExistsError: one of them exists; none was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        if os.path.lexists(folder / name):
            raise FileExistsError(17, "exists", str(folder / name))
    for name, content in files.items():
        mode = 0o644 if name.endswith((".crt", ".pub")) else 0o600
        with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)


def _unsigned(name: str, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fcil development CA")]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # other machines' clocks may be a little behind
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


if __name__ == "__main__":
    main()
