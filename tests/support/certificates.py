# SPDX-License-Identifier: Apache-2.0

"""Certificates for tests."""

import datetime
import ipaddress

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization
from cryptography import x509
from cryptography.x509 import oid


def _general_name(address):
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def make_pki(directory):
    """Write a server's and a client's files, named as nbdkit and QEMU do."""
    directory.mkdir(parents=True, exist_ok=True)
    signer = Authority(directory, 'ca-cert')
    for name in ('server', 'client'):
        both = signer.issue(name).read_text()
        at = both.index('-----BEGIN PRIVATE')
        (directory / f'{name}-cert.pem').write_text(both[:at])
        (directory / f'{name}-key.pem').write_text(both[at:])


class Authority:
    """Signs certificates, and writes them into a directory."""

    def __init__(self, directory, name='authority'):
        self.directory = directory
        self.name = name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(
            oid.NameOID.COMMON_NAME, name)])
        self.path = self._write(name, self._sign(
            self.subject, self.key.public_key(), authority=True))

    def _sign(self, subject, key, authority=False, addresses=(), days=1):
        now = datetime.datetime.now(datetime.timezone.utc)
        day = datetime.timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(
            subject).issuer_name(self.subject).public_key(key).serial_number(
                x509.random_serial_number()).not_valid_before(
                    now - day).not_valid_after(now + days * day).add_extension(
                        x509.BasicConstraints(authority, None), True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key), False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(
                self.key.public_key()), False)
        if authority:
            builder = builder.add_extension(x509.KeyUsage(
                False, False, False, False, False, True, True, False, False),
                True)
        else:
            builder = builder.add_extension(x509.SubjectAlternativeName([
                _general_name(address) for address in (
                    'localhost', '127.0.0.1', *addresses)]), False)
        return builder.sign(self.key, hashes.SHA256())

    def _write(self, name, certificate, key=None):
        path = self.directory / f'{name}.pem'
        content = certificate.public_bytes(serialization.Encoding.PEM)
        if key is not None:
            content += key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption())
        path.write_bytes(content)
        return path

    def issue(self, name, *addresses, days=1):
        """Return the path of a file with a certificate and its key.

        :param addresses: addresses or names that it is valid for, besides the
            loopback
        :param days: days of its validity from now on
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(
            oid.NameOID.COMMON_NAME, name)])
        return self._write(name, self._sign(
            subject, key.public_key(), addresses=addresses, days=days), key)

    def revoke(self, *paths, days=1):
        """Return the path of a file with a list that revokes certificates.

        :param days: until it must have been renewed
        """
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateRevocationListBuilder().issuer_name(
            self.subject).last_update(
                now - datetime.timedelta(days=3)).next_update(
                    now + datetime.timedelta(days=days))
        for path in paths:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder().serial_number(
                    certificate.serial_number).revocation_date(now).build())
        path = self.directory / f'{self.name}.crl'
        # A program that renews the file does the same.
        temporary = path.with_suffix('.new')
        temporary.write_bytes(builder.sign(
            self.key, hashes.SHA256()).public_bytes(
                serialization.Encoding.PEM))
        return temporary.rename(path)
