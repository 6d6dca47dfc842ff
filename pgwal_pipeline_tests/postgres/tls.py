"""Certificates of a test's own, and ways to a server that speak TLS alone: a server built with it, or a stand-in before any server."""

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pgwal_pipeline.embedded.postgres import Installation, Postgres, servers
from pgwal_pipeline_tests.support import start_server

_SSL_REQUEST = struct.pack(">II", 8, 80877103)
_GSS_REQUEST = struct.pack(">II", 8, 80877104)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority with its files in `folder`; `certificate` is what trusts it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        made = _builder(self._name, self._name, self._key, timedelta(days=1)).add_extension(
            x509.BasicConstraints(True, None), critical=True
        )
        self.certificate = self._write("ca.crt", made.sign(self._key, hashes.SHA256()))

    def issue(self, name: str, *, hosts: tuple[str, ...] = (), valid: timedelta = timedelta(days=1)) -> Pair:
        """A certificate for the role or server `name`; with a negative `valid` it has expired. A host may be an address."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key, valid)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
        number = len(list(self._folder.iterdir()))
        path = self._folder / f"{number}.key"
        path.touch(0o600)
        path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return Pair(self._write(f"{number}.crt", builder.sign(self._key, hashes.SHA256())), path)

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        path = self._folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ip_address(host))
    return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + valid)
    )


def tls_installation() -> Installation | None:
    """A server at hand that was built with TLS; the embedded ones were not."""
    return next((found for found in servers() if b"SSL_CTX_new" in (found.bin / "postgres").read_bytes()), None)


def start_tls_server(data_dir: Path, installation: Installation, server: Pair, client_ca: Path) -> Postgres:
    """A server that takes nothing over TCP but TLS with a client certificate of `client_ca` in the role's name."""
    made = start_server(data_dir, installation)
    owner = data_dir.stat()
    for name, source in {"server.crt": server.certificate, "server.key": server.key, "clients.crt": client_ca}.items():
        path = data_dir / name
        path.touch(0o600)
        path.write_bytes(source.read_bytes())
        os.chown(path, owner.st_uid, owner.st_gid)
    made.settings |= {"ssl": "on", "ssl_ca_file": "clients.crt"}
    (data_dir / "pg_hba.conf").write_text(
        "".join(f"local {database} all trust\nhostssl {database} all 127.0.0.1/32 cert\n" for database in ("all", "replication"))
    )
    made.restart()
    return made


class Terminator:
    """Stands before a server that has no TLS, and takes nothing else: what comes in by TLS goes on to `target`, a port of 127.0.0.1.

    `connections` counts those that were let through. A client without a certificate of `client_ca` is not.
    """

    def __init__(self, target: int, server: Pair, client_ca: Path) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(server.certificate, server.key)
        self._context.load_verify_locations(client_ca)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[plain], daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain:
            asked = plain.recv(8, socket.MSG_WAITALL)
            while asked == _GSS_REQUEST:
                plain.sendall(b"N")
                asked = plain.recv(8, socket.MSG_WAITALL)
            if asked != _SSL_REQUEST:
                return
            plain.sendall(b"S")
            with (
                self._context.wrap_socket(plain, server_side=True) as client,
                socket.create_connection(("127.0.0.1", self._target)) as server,
            ):
                self.connections += 1
                _pump(client, server)


def _pump(client: ssl.SSLSocket, server: socket.socket) -> None:
    """Pass on what comes from either side until one ends."""
    lock = threading.Lock()  # an SSL socket is not for two threads at once
    client.setblocking(False)
    done = threading.Event()

    def answers() -> None:
        with contextlib.suppress(OSError):
            while octets := server.recv(1 << 16):
                _send(client, lock, octets)
        done.set()
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=answers, daemon=True).start()
    try:
        while not done.is_set():
            with lock:
                try:
                    octets = client.recv(1 << 16)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    octets = None
            if octets is None:
                select.select([client], [], [], 0.5)
            elif octets:
                server.sendall(octets)
            else:
                break
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def _send(client: ssl.SSLSocket, lock: threading.Lock, octets: bytes) -> None:
    view = memoryview(octets)
    while view:
        with lock:
            try:
                view = view[client.send(view) :]
                continue
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                pass
        select.select([], [client], [], 0.5)


@contextlib.contextmanager
def terminator(target: int, server: Pair, client_ca: Path) -> Iterator[Terminator]:
    """A Terminator for as long as the block runs."""
    made = Terminator(target, server, client_ca)
    try:
        yield made
    finally:
        made.close()
