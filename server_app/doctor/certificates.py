"""Certificates that expire: for fcil doctor, and for the log of a run."""

import logging
import os
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from server_app.doctor.finding import Finding

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)

VARIABLE = "FCIL_CERTIFICATES"  # files, separated as in PATH
WARNING = timedelta(days=30)
_RENEW = "docs/guides/operations.md says how to renew it"
_DAY = 86_400.0  # seconds


def watched_certificates() -> list[str]:
    """The files that the environment variable names."""
    return [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def check_certificates(paths: Iterable[str]) -> Iterator[Finding]:
    """Whether each certificate in PEM files is valid now and in WARNING's time; nothing else is checked.

    Only files are read. A program that loaded an earlier file must be restarted after the renewal.
    """
    for path in paths:
        try:
            from cryptography.x509 import load_pem_x509_certificates

            certificates = load_pem_x509_certificates(Path(path).read_bytes())
            yield from [_check(path, certificate, datetime.now(UTC)) for certificate in certificates]
        except Exception as error:  # damaged ones raise errors of several types, some only when the subject is read
            yield Finding("problem", f"{path}: no certificate can be read: {error}")


def _check(path: str, certificate: "Certificate", now: datetime) -> Finding:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    text = f"certificate {certificate.subject.rfc4514_string()} in {path}"
    if now < begin:
        return Finding("problem", f"{text} is not valid before {begin:%Y-%m-%d %H:%M} UTC", "is the clock right?")
    if end <= now:
        return Finding("problem", f"{text} has expired on {end:%Y-%m-%d}", _RENEW)
    text += f" expires on {end:%Y-%m-%d}, in {(end - now).days} days"
    return Finding("ok", text) if end - now > WARNING else Finding("warning", text, _RENEW)


class CertificateWatch:
    """Warns in the log of a run, at its start and once a day, of certificates that the environment names."""

    def __init__(self) -> None:
        self._next = 0.0

    def look(self) -> None:
        """Warn if it is time."""
        if time.time() < self._next:
            return
        self._next = time.time() + _DAY
        for finding in check_certificates(watched_certificates()):
            if finding.level != "ok":
                log.warning("; ".join(filter(None, (finding.text, finding.advice))))
