"""What releases with noise are worth: epsilon against published numbers, and releases counted by client."""

import math
from pathlib import Path

import pytest
from scipy import stats

from server_app.errors import RunError
from server_app.privacy.account import charge, open_account, record_asked, releases_per_message, require_asked_clients
from server_app.privacy.accountant import epsilon
from server_app.run_files.results import RoundReport
from task.config.parsing import parse
from task.keys import ConfigError
from tests.helpers.runs import PRIVATE


def exact_delta(epsilon: float, multiplier: float, releases: int) -> float:
    """Theorem 8 of Balle and Wang (2018), by scipy; so many releases of sigma are one of sigma / sqrt(k)."""
    mu = math.sqrt(releases) / multiplier
    second = math.exp(epsilon + stats.norm.logcdf(-epsilon / mu - mu / 2))
    return float(stats.norm.cdf(-epsilon / mu + mu / 2) - second)


def renyi_epsilon(multiplier: float, releases: int, delta: float) -> float:
    """Min over a of k a / (2 sigma^2) + log(1 / delta) / (a - 1) (Mironov 2017), a bound that is not tight."""
    budget = releases / (2 * multiplier**2)
    return budget + 2 * math.sqrt(budget * math.log(1 / delta))


ACCOUNTS = [(1, 1, 1e-5), (0.5, 6, 1e-5), (5, 15, 1e-5), (2, 100, 1e-6), (100, 3, 1e-9), (0.01, 300, 1e-5)]


@pytest.mark.parametrize(("multiplier", "releases", "delta"), ACCOUNTS)
def test_epsilon_solves_the_equation_of_balle_and_wang(multiplier: float, releases: int, delta: float) -> None:
    solution = epsilon(multiplier, releases, delta)
    if solution < 1000:  # beyond, float64 has too few digits for e^epsilon in scipy's formula
        assert exact_delta(solution, multiplier, releases) == pytest.approx(delta, rel=1e-6)
    assert 0 < solution <= renyi_epsilon(multiplier, releases, delta)


@pytest.mark.parametrize(
    ("multiplier", "delta", "published"),
    [
        (3.7306316348159374, 1e-5, 1.0),
        (4.0, 1e-5, 0.9263415039982288),
        (1.0, 1e-5, 4.377178095681137),
        (0.5, 1e-5, 9.997256146434315),
        (0.1, 1e-5, 91.81728962466373),
        (0.001, 1e-5, 504263.8929206541),
    ],
)
def test_epsilon_is_that_of_googles_calculation(multiplier: float, delta: float, published: float) -> None:
    """Numbers of gaussian_mechanism.get_epsilon_gaussian and get_sigma_gaussian in Google's dp-accounting 0.6."""
    assert epsilon(multiplier, 1, delta) == pytest.approx(published, rel=1e-9)
    assert epsilon(multiplier * 5, 25, delta) == pytest.approx(published, rel=1e-9)  # 25 releases of a fifth of mu


@pytest.mark.parametrize(("multiplier", "releases"), [(5e-10, 10), (1e-8, 10_000)])
def test_epsilon_of_hardly_any_noise_is_huge_and_finite(multiplier: float, releases: int) -> None:
    mu = releases**0.5 / multiplier
    assert epsilon(multiplier, releases, 1e-12) == pytest.approx(mu**2 / 2, rel=1e-6)


def test_epsilon_grows_with_releases_and_falls_with_noise() -> None:
    assert epsilon(1, 1, 1e-5) < epsilon(1, 2, 1e-5) < epsilon(0.5, 2, 1e-5)
    assert epsilon(100, 1, 0.5) == pytest.approx(0, abs=1e-12)  # this delta alone covers the difference


def test_no_release_costs_nothing() -> None:
    assert epsilon(1.0, 0, 1e-5) == 0


def test_the_worst_client_is_charged_for_every_round_of_a_task_in_which_it_had_data(tmp_path: Path) -> None:
    """Two rounds: c was asked twice and failed, perhaps after it had sent; a has no data for the task; b answered once.

    The next task is learned from other images: its one round by a adds nothing to the worst.
    """
    config = parse({"method": "hgp", **PRIVATE, "privacy-delta": 1e-6})
    assert releases_per_message(config, 1, True) == 3
    account = open_account(config)
    path, late = tmp_path / "checkpoint" / "asked.jsonl", [{"name": "c", "reason": "late"}]
    rounds = []
    for task, round, names in ((1, 1, ["a", "b", "c"]), (1, 2, ["a", "c"]), (2, 1, ["a", "b"])):
        idle = ["a"] if task == 1 else []
        rounds += [RoundReport(task, round, names, failures=late if "c" in names else [], idle=idle)]
        record_asked(path, rounds[-1], 3)
        account = charge(account, path, rounds)
    assert account["releases"] == [3, 6, 6]
    assert account["worst_client"] == "c"
    assert account["epsilon"] == [epsilon(0.5, n, 1e-6) for n in (3, 6, 6)]
    for _ in range(3):  # a round that was cut short and repeated three times
        record_asked(path, RoundReport(1, 2, ["b", "c"]), 3)
    assert charge(account, path, rounds)["releases"][-1] == 15
    assert open_account(parse({"privacy-clip": 1.0})) == {}
    assert charge({}, path, rounds) == {}


def test_noise_that_the_server_can_take_away_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    drawn, seeded = (open_account(parse({**PRIVATE, "privacy-seeded": is_seeded})) for is_seeded in (False, True))
    assert (drawn["seeded"], seeded["seeded"], len(caplog.messages)) == (False, True, 1)
    assert "privacy-seeded = true: whoever knows the seed, as the server does, can take the noise away" in caplog.text


def test_an_idle_round_takes_back_no_release(tmp_path: Path) -> None:
    """One that has answered twice and then says to have nothing, as after the loss of its disk, has released twice."""
    account, path, rounds = open_account(parse({"method": "hgp", **PRIVATE})), tmp_path / "asked.jsonl", []
    for round, idle in enumerate(([], [], ["a"], []), 1):
        rounds += [RoundReport(1, round, ["a"], idle=idle)]
        record_asked(path, rounds[-1], 3)
        account = charge(account, path, rounds)
    assert account["releases"] == [3, 6, 6, 9]
    require_asked_clients(account, path, rounds)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="has lost lines"):
        require_asked_clients(account, path, rounds)
    path.write_bytes(path.read_bytes() + bytes(40) + b"\n")  # as a power cut may leave it
    with pytest.raises(ConfigError, match="has lost lines"):
        require_asked_clients(account, path, rounds)
    path.unlink()
    with pytest.raises(ConfigError, match="has lost lines"):
        require_asked_clients(account, path, rounds)
    with pytest.raises(RunError, match="has lost lines"):  # while a run goes on
        charge(account, path, rounds)
    require_asked_clients({}, path, rounds)


def test_releases_are_counted_by_method() -> None:
    expected = {"fedavg": 1, "hepco": 1, "ncm": 1, "fppl": 2, "fedprok": 2, "hgp": 3, "pip": 3, "ccvr": 3, "afcl": 2}
    expected["fedrda"] = 1  # of its first round, which trains a prompt
    assert {name: releases_per_message(parse({"method": name}), 1, False) for name in expected} == expected


def test_rounds_without_statistics_release_the_arrays_alone(tmp_path: Path) -> None:
    """Three rounds of arrays, the last one with means and variances: 1, 1 and 3 releases; a has none in the second."""
    config = parse({"method": "hgp", "statistics-rounds": "last", **PRIVATE})
    assert [releases_per_message(config, 1, ends_task) for ends_task in (False, True)] == [1, 3]
    account, path, rounds = open_account(config), tmp_path / "asked.jsonl", []
    for round, releases in enumerate((1, 1, 3), 1):
        rounds += [RoundReport(1, round, ["a"], idle=["a"] if round == 2 else [])]
        record_asked(path, rounds[-1], releases)
        account = charge(account, path, rounds)
    assert account["releases"] == [1, 1, 4]
