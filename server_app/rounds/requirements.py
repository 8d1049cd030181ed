"""What a round, a task and a run must have for the run to go on; where they do not, the run ends and says why."""

import logging
from collections.abc import Sequence

from server_app.errors import RunError
from server_app.run_files.results import Results, RoundReport

log = logging.getLogger(__name__)


def require_quorum(problem: str, report: RoundReport, ends_task: bool, results: Results) -> None:
    """Check that enough clients have answered; the log warns of a task that no client has learned.

    ``problem`` says why the round cannot be used, or is empty.

    Raises:
        RunError: the ``problem``, or fewer answers than the quorum. The round is recorded.
    """
    participants, config = len(report.participants), results.config
    answered = participants - len(report.failures)
    if answered < config.quorum:
        problem = problem or f"{answered} of {participants} clients answered, the quorum is {config.quorum}"
    reasons = _first_reasons([report])
    if ends_task and results.is_not_learned(report.task):
        said = "no client with its images has trained in any of its rounds: they failed, were away or not drawn"
        said += ", or the rounds were dropped" * any(r.dropped for r in results.rounds if r.task == report.task)
        log.warning("task %d is not learned: %s.%s", report.task, said, f" {reasons}" if reasons else "")
        if config.method_row.pooled:  # one client has all images, and the others are not asked for any
            problem = problem or said
    if problem:
        results.write_round()
        raise RunError(f"task {report.task}, round {report.round}: {problem}. {reasons}")


def require_usable_model(spoiled: str, report: RoundReport, results: Results) -> None:
    """Check, after the last round of a task, that a round has given a model; ``spoiled`` says why the last did not.

    Raises:
        RunError: the models of all rounds were dropped. The round is recorded.
    """
    if not all(r.dropped for r in results.rounds if r.task == report.task):
        return
    steps = [key for key in results.config.method_row.own_keys() if key.endswith("learning-rate")]
    lower = f"lower the step size of the server ({', '.join(steps)})."
    refined = lower if steps else "what the server computed has numbers that are not finite, or far too large."
    results.write_round()
    raise RunError(f"no round of task {report.task} gave a usable model: {spoiled or refined}")


def require_training(rounds: Sequence[RoundReport]) -> None:
    """Check, after the last round, that a client has trained in one of the ``rounds``.

    Raises:
        RunError: none has.
    """
    if not any(r.trained for r in rounds):
        idle = "those that were asked had no image of the classes of their round"
        raise RunError(f"no client has trained in any round: {_first_reasons(rounds) or idle}")


def _first_reasons(rounds: Sequence[RoundReport]) -> str:
    return "; ".join([f"{failed['name']}: {failed['reason']}" for report in rounds for failed in report.failures][:3])
