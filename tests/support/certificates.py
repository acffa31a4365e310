"""Certificates for TLS, made with openssl: two authorities, and who they vouch for."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.requirements import missing


def is_there() -> bool:
    return shutil.which("openssl") is not None


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


def needed(folder: Path) -> Certificates:
    """For a test that is skipped where openssl is missing."""
    if not is_there():
        missing("openssl", "install the package openssl")
    return Certificates(folder)


class Certificates:
    """``authority`` vouches for ``server`` (127.0.0.1, and no name) and ``client``; ``stranger`` for nobody."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = self._authority("authority")
        self.stranger = self._authority("stranger")
        self.server = self._signed("server", "subjectAltName=IP:127.0.0.1")
        self.client = self._signed("client", "extendedKeyUsage=clientAuth")

    def _authority(self, name: str) -> Pair:
        pair = self._pair(name)
        extensions = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
        self._run(
            "req",
            "-x509",
            *self._new_key(pair),
            *self._subject(name),
            "-days",
            "2",
            "-out",
            pair.certificate,
            *extensions,
        )
        return pair

    def _signed(self, name: str, extension: str) -> Pair:
        pair = self._pair(name)
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(extension + "\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n")
        self._run("req", *self._new_key(pair), *self._subject(name), "-out", request)
        self._run(
            "x509", "-req", "-in", request, "-CA", self.authority.certificate, "-CAkey", self.authority.key,
            "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", pair.certificate,
        )  # fmt: skip
        return pair

    def _pair(self, name: str) -> Pair:
        return Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")

    def _new_key(self, pair: Pair) -> tuple[object, ...]:
        return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", pair.key

    def _subject(self, name: str) -> tuple[str, str]:
        return "-subj", f"/CN=distlock {name}"

    def _run(self, *arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    @property
    def of_server(self) -> list[str]:
        """Settings of a server, as words of its command line."""
        files = {"cert": self.server.certificate, "key": self.server.key, "ca-cert": self.authority.certificate}
        return [word for kind, path in files.items() for word in (f"--tls-{kind}-file", str(path))]
