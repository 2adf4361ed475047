"""A web server with TLS on this machine, certificates and all, for what the gateway fetches."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOST = "media.test"
Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass
class Authority:
    """A certificate authority that lives as long as a test.

    ``trusting`` is what a client uses to believe it.  What it signs is valid from ``begins`` to ``ends``,
    counted from now.
    """

    directory: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    name: x509.Name = field(
        default_factory=lambda: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    )
    begins: datetime.timedelta = datetime.timedelta(days=-1)
    ends: datetime.timedelta = datetime.timedelta(days=60)

    def __post_init__(self) -> None:
        self.certificate = self.sign(self.name, self.key, ca=True)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)

    @property
    def trusting(self) -> ssl.SSLContext:
        pem = self.certificate.public_bytes(serialization.Encoding.PEM).decode()
        return ssl.create_default_context(cadata=pem)

    def serving(self, host: str, *extensions: x509.ExtensionType) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        certificate = self.sign(name, key, False, host, *extensions)
        path = self.directory / f"{host}.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context

    def sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        ca: bool,
        host: str | None = None,
        *extensions: x509.ExtensionType,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + self.begins)
            .not_valid_after(now + self.ends)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            # Python 3.13 wants these.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
        )
        if ca:
            builder = builder.add_extension(_SIGNS, critical=True)
        if host is not None:
            names: list[x509.GeneralName] = [x509.DNSName(host)]
            if host[0].isdigit():
                names = [x509.IPAddress(ipaddress.ip_address(host))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, hashes.SHA256())


@dataclass
class HttpsServer:
    """Answers by path; a path that it does not know is 404.

    Attributes:
        authority: Who has signed its certificate.
        port: Where it listens, on 127.0.0.1.
        asked: The requests that came, head by head.
        answers: What to do for a path.
    """

    authority: Authority
    port: int = 0
    asked: list[str] = field(default_factory=list)
    answers: dict[str, Handler] = field(default_factory=dict)

    def give(self, path: str, body: bytes, status: str = "200 OK", headers: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode()

        async def answer(writer: asyncio.StreamWriter) -> None:
            writer.write(head + body)
            await writer.drain()

        self.answers[path] = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(head)
            answer = self.answers.get(head.split()[1])
            if answer is None:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nsecret")
            else:
                await answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            # The gateway hung up, as it should for some answers.
            return
        finally:
            writer.close()


@asynccontextmanager
async def https_server(authority: Authority, host: str = HOST) -> AsyncIterator[HttpsServer]:
    ours = HttpsServer(authority)
    server = await asyncio.start_server(ours.serve, "127.0.0.1", 0, ssl=authority.serving(host))
    ours.port = server.sockets[0].getsockname()[1]
    try:
        yield ours
    finally:
        server.close()
