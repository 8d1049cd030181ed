"""Certificates that expire are named 30 days ahead, by fcil doctor and in the log of a run."""

import datetime
import os
import ssl
from pathlib import Path

import pytest

from server_app.cli import main as cli
from server_app.doctor import certificates
from server_app.doctor.certificates import CertificateWatch, check_certificates
from server_app.doctor.finding import Finding
from tests.helpers.proxy import make_keys
from tests.helpers.runs import Values, run


def make(folder: Path, days: int) -> Path:
    make_keys.main([str(folder), "--nodes", "0", "--days", str(days)])
    return folder / "server.crt"


@pytest.mark.parametrize(("days", "level"), [(40, "ok"), (31, "ok"), (30, "warning"), (1, "warning")])
def test_the_last_thirty_days_are_warned_of(days: int, level: str, tmp_path: Path) -> None:
    [finding] = check_certificates([str(make(tmp_path, days))])
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    assert finding.level == level
    assert finding.text.startswith(
        f"certificate CN=fcil server in {tmp_path}/server.crt expires on {end:%Y-%m-%d}, in "
    )
    assert bool(finding.advice) == (level == "warning")


@pytest.mark.parametrize(
    ("shift", "words"),
    [(datetime.timedelta(days=6), "has expired on"), (-datetime.timedelta(hours=1), "not valid before")],
)
def test_what_is_not_valid_now_is_a_problem(
    shift: datetime.timedelta, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, 5)

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) + shift

    monkeypatch.setattr(certificates, "datetime", Shifted)
    [finding] = check_certificates([str(path)])
    assert finding.level == "problem"
    assert words in finding.text


def test_every_certificate_of_a_file_is_checked(tmp_path: Path) -> None:
    both = (make(tmp_path / "a", 5).read_text(), make(tmp_path / "b", 100).read_text())
    (tmp_path / "both.crt").write_text("".join(both))
    assert [f.level for f in check_certificates([str(tmp_path / "both.crt")])] == ["warning", "ok"]


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_file_without_one_is_a_problem(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "ca.crt").write_text(content)
    [finding] = check_certificates([str(tmp_path / "ca.crt")])
    assert finding.level == "problem"
    assert "no certificate can be read" in finding.text


@pytest.mark.parametrize(
    "damage",
    [
        (b"fcil server", b"\xffcil server"),
        (b"\x17\r2", b"\x17\rx"),
        (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x04"),  # no ValueError, but a type of its own
    ],
    ids=["name", "date", "version"],
)
def test_what_cannot_be_parsed_in_one_is_a_problem(damage: tuple[bytes, bytes], tmp_path: Path) -> None:
    good = make(tmp_path, 40).read_text()
    der = ssl.PEM_cert_to_DER_cert(good)
    damaged = ssl.DER_cert_to_PEM_cert(der.replace(*damage))
    (tmp_path / "odd.crt").write_text(damaged)
    (tmp_path / "both.crt").write_text(damaged + good)
    assert "problem" in [finding.level for finding in check_certificates([str(tmp_path / "both.crt")])]
    [finding] = check_certificates([str(tmp_path / "odd.crt")])
    assert finding.level == "problem"
    assert finding.text.startswith(f"{tmp_path}/odd.crt: no certificate can be read: ")


@pytest.fixture
def quick_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server_app.doctor.machine.examine", lambda config: [Finding("ok", "the rest")])


@pytest.mark.usefixtures("quick_doctor")
def test_the_doctor_checks_those_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    soon, later = make(tmp_path / "soon", 5), make(tmp_path / "later", 100)
    capsys.readouterr()
    assert cli.main(["doctor", "--certificate", str(soon), "--certificate", str(later)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["warning", "ok", "ok"]
    monkeypatch.setenv("FCIL_CERTIFICATES", f"{tmp_path}/none.crt{os.pathsep}{later}")
    assert cli.main(["doctor"]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["problem", "ok", "ok"]


def test_a_run_warns_in_its_log(
    tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FCIL_CERTIFICATES", f"{make(tmp_path / 'keys', 5)}")
    run(tiny)  # of two rounds
    [said] = [r.message for r in caplog.records if "certificate" in r.message]
    assert said.startswith("certificate CN=fcil server in ")
    assert "expires on" in said
    assert "docs/guides/operations.md says how to renew it" in said


def test_a_long_run_warns_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FCIL_CERTIFICATES", f"{make(tmp_path, 5)}")
    clock, said, watch = 1e9, [], CertificateWatch()
    monkeypatch.setattr(certificates.time, "time", lambda: clock)
    for hours in (0, 1, 23, 25, 26, 49):
        clock = 1e9 + 3600 * hours
        caplog.clear()
        watch.look()
        said.append(len(caplog.records))
    assert said == [1, 0, 0, 1, 0, 1]
