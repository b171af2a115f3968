"""Where a server listens: at an address or a Unix socket, with TLS or without."""

import contextlib
import dataclasses
import os
import socket
import ssl
import stat
from pathlib import Path

EVERYWHERE = ("0.0.0.0", "::")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where a server listens.

    Attributes:
      host, port: the address; port 0 takes a free one.
      path: of a Unix socket, in place of an address.
      certificate, key: PEM files for TLS; without ``key`` the certificate's file holds it, too.
      root_path: prefix of all paths that a proxy puts before them, such as ``/llm``.

    Raises ValueError for a certificate that cannot be used, and a bad ``root_path``.
    """

    host: str = "127.0.0.1"
    port: int = 0
    path: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    root_path: str = ""

    def __post_init__(self):
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise ValueError(f"--root-path must be like /llm, got {self.root_path!r}")
        if self.certificate is None and self.key is not None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        if self.certificate is not None:
            _check_certificate(self.certificate, self.key)

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    def listen(self) -> socket.socket:
        """A socket. Raises OSError that names the place."""
        try:
            return self._at_address() if self.path is None else _at_path(self.path)
        except OSError as error:
            where = f"{self.host}:{self.port}" if self.path is None else self.path
            raise OSError(f"cannot listen at {where}: {error.strerror or error}") from error

    def _at_address(self) -> socket.socket:
        [first, *_] = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return socket.create_server(first[4][:2], family=first[0])

    def url(self, listening: socket.socket) -> str:
        """What clients ask, or where the Unix socket is."""
        if self.path is not None:
            return f"unix:{self.path}{self.root_path}"
        host = "127.0.0.1" if self.host in EVERYWHERE else self.host
        return f"{self.scheme}://{host}:{listening.getsockname()[1]}{self.root_path}"

    def close(self) -> None:
        """Remove what ``listen`` has made in the file system."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _at_path(path: Path) -> socket.socket:
    """A Unix socket. One that another server left behind is replaced, one that is served is not."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(f"{path} is there, and is no socket")
        with socket.socket(socket.AF_UNIX) as other:
            try:
                other.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError("another server listens there")
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(path))
        os.chmod(path, 0o660)
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def _check_certificate(certificate: Path, key: Path | None) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate,
            key,
            password="",  # else OpenSSL would ask at the terminal
        )
    except FileNotFoundError as error:
        missing = next(path for path in (certificate, key) if path and not path.exists())
        raise ValueError(f"there is no file {missing}") from error
    except (OSError, ssl.SSLError) as error:
        files = f"{certificate}" if key is None else f"{certificate} with {key}"
        raise ValueError(f"cannot use the certificate {files}: {error}") from error
