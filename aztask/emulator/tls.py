"""A self-signed certificate for the emulator, and the TLS context of its listeners.

The certificate is made at the first start, with the package ``cryptography``. It is its own
authority: configure clients to trust the file.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from aztask.errors import ConfigurationError
from aztask.support.private import make_directory, make_file

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    AVAILABLE = True
except ImportError:  # an extra
    AVAILABLE = False

CERTIFICATE_FILE = "aztask-emulator-cert.pem"
KEY_FILE = "aztask-emulator-key.pem"
VALID_DAYS = 365


def server_context(directory: Path, host: str) -> tuple[ssl.SSLContext, Path]:
    """Return a context for the listeners, and the certificate file that clients must trust.

    Missing files are made in `directory`. Raises ConfigurationError if that needs ``cryptography``
    and it is not installed.
    """
    certificate, key = directory / CERTIFICATE_FILE, directory / KEY_FILE
    if not certificate.exists() or not key.exists():
        if not AVAILABLE:
            raise ConfigurationError(
                "TLS needs a certificate, and making one needs the package cryptography:"
                f" pip install cryptography, or put {CERTIFICATE_FILE} and {KEY_FILE}"
                f" into {directory}"
            )
        make_directory(directory)
        _make(certificate, key, host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


def _make(certificate: Path, key: Path, host: str) -> None:
    """Write a key that only its owner can read, and a certificate for it."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "aztask emulator")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    make_file(key)
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    make_file(certificate)
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _names(host: str) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.DNSName("localhost")]
    for address in {"127.0.0.1", "::1", host}:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            if address != "localhost":
                names.append(x509.DNSName(address))
    return names
