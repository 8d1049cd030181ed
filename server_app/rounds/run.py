"""One run from first hello to last picture: the only place that owns the round loop."""

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from server_app.clients.client_info import ClientInfo
from server_app.clients.nodes import write_nodes
from server_app.clients.sampling import sample_clients
from server_app.doctor.certificates import CertificateWatch
from server_app.errors import RunError, reason_of
from server_app.privacy.account import (
    charge,
    open_account,
    record_asked,
    releases_per_message,
    require_asked_clients,
)
from server_app.rounds.aggregation import RoundAggregator
from server_app.rounds.measurement import (
    count_on_server,
    local_distance,
    response_entropies,
    sum_client_counts,
    sum_hidden_counts,
)
from server_app.rounds.progress import describe_round, summary
from server_app.rounds.reply_checks import MAX_VALUE
from server_app.rounds.report_drawer import ReportDrawer
from server_app.rounds.requirements import require_quorum, require_training, require_usable_model
from server_app.rounds.setup import (
    connect_clients,
    lay_out_tasks,
    log_tasks,
    plan_tasks,
    prepare_features,
    settle_adaptation,
    wait_for_new_classes,
)
from server_app.run_files.checkpoints import read_checkpoint, write_checkpoint
from server_app.run_files.locks import lock_run
from server_app.run_files.on_end import require_hook, tell_operator
from server_app.run_files.paths import require_writable, run_directory
from server_app.run_files.results import Results, RoundReport
from server_app.run_files.resume import require_same_keys, require_same_start
from server_app.run_files.status import FINISHED, RUNNING, read_results
from server_app.run_files.tensorboard import add_round, open_tensorboard, require_tensorboard
from server_app.run_files.writers import write_config, write_model
from server_app.secure_aggregation.secure_sum import SecureSum
from server_app.transport.base import SMALL_ANSWER, Reply, Transport, count_answers
from strategies.base import RoundContext, Strategy, Update
from task.config.checks import require_few
from task.config.parsing import ignored_keys
from task.config.schema import Config
from task.data.digests import data_digest
from task.data.load import is_published
from task.keys import ConfigError
from task.message import Arrays, Kind, Packet
from task.methods import load_class
from task.models.metadata import MODEL, ModelMetadata
from task.models.model import build_model
from task.scenario.client_data import has_fixed_images
from task.scenario.scenario import build_scenario
from task.scenario.task_plan import TaskPlan

log = logging.getLogger(__name__)


def run_experiment(config: Config, transport: Transport, initial: Arrays | None = None) -> Path:
    """Run everything that ``config`` says; returns the run's directory.

    ``initial`` are arrays to start from instead of the seeded ones, of the names and shapes of the first task's.

    Raises:
        ConfigError: data, weights or settings cannot be used; nearly all are found before anything is written.
        RunError: no quorum, or clients that cannot work together.
        OSError: a file cannot be written; what was saved stays.
    """
    torch.set_num_threads(config.threads)
    directory = run_directory(config)
    require_hook(config.on_end)
    with contextlib.ExitStack() as after_telling:
        try:
            run = _run_all(config, transport, directory, initial, after_telling)
        except BaseException as error:
            tell_operator(config.on_end, directory, None if _still_finished(directory, error) else error)
            raise
    try:
        run.draw()
    finally:  # a signal that comes while pictures are drawn does not undo what is recorded
        tell_operator(config.on_end, directory)
    log.info("finished: %s", "\n".join(summary(directory)))
    return directory


def _still_finished(directory: Path, error: BaseException) -> bool:
    """Whether it is a finished run that a signal stopped while it waited for new classes."""
    return not isinstance(error, Exception) and read_results(directory).get("status") == FINISHED


def _run_all(
    config: Config, transport: Transport, directory: Path, initial: Arrays | None, after_telling: contextlib.ExitStack
) -> "Run":
    """The run after its last round; if it failed, its pictures are drawn when ``after_telling`` closes."""
    require_tensorboard(config)
    require_writable(directory)
    log.info("results go to %s", directory)
    if unread := ignored_keys(config):
        log.warning("method %s trains nothing locally and ignores %s", config.method, ", ".join(unread))
    with contextlib.ExitStack() as locks:
        if config.resume:
            locks.enter_context(lock_run(directory))
        run = Run(config, transport, directory, initial, locks)
        try:
            run.run()
        except BaseException as error:
            run.fail(error)
            after_telling.callback(run.draw_failed)  # Flower kills what it has told to end after 5 s
            raise
    return run


class Run:
    """State of one run: its clients, the method's server half, data and tasks, the global model, what was measured.

    ``plan`` has the classes and tasks that the server made from the nodes' answers; None where nodes have no images of
    their own.
    """

    def __init__(
        self,
        config: Config,
        transport: Transport,
        directory: Path,
        initial: Arrays | None,
        locks: contextlib.ExitStack,
    ) -> None:
        """Set the run up; ``locks`` gets the lock of a new run's directory."""
        account = open_account(config)
        self.transport, self.directory = transport, directory
        self._asked_path = directory / "checkpoint" / "asked.jsonl"
        checkpoint = read_checkpoint(directory / "checkpoint") if config.resume else None
        self.plan: TaskPlan | None = checkpoint["plan"] if checkpoint else None
        planned = self.plan.class_names if self.plan else ()
        self.config, self.registry, copies = connect_clients(config, transport, planned)
        if not checkpoint:
            self.plan = plan_tasks(self.config, self.registry.clients)
        self.scenario = lay_out_tasks(self.config, self.plan, self.registry)
        asked, saved = self.config, checkpoint["keys"] if checkpoint else {}
        self.config = settle_adaptation(asked, self.registry.clients, self.scenario, saved)
        self.scenario = build_scenario(self.config, self.plan)
        self.strategy: Strategy = load_class(self.config.method_row.strategy)(self.config)
        log_tasks(self.scenario)
        dataset, name = self.scenario.dataset, config.dataset
        self._data_sha256 = "" if config.own_data else data_digest(dataset, whole_files=not is_published(name))
        self.model = build_model(self.config, self.scenario.task_sizes(0))
        if initial:
            self.model.load(initial)
        self.results = Results(directory, self.config, self.scenario)
        self.results.copies = copies
        if transport.one_process:
            self.results.start_cpu_clock()
        self.results.privacy = account
        if sharing := self.results.sharing:
            log.info("each client has %(common)d common classes and %(private)d private ones", sharing)
            log.info("%(overlap)d of the private places repeat a class of another client", sharing)
        if checkpoint:
            self.finished_rounds = self._restore(checkpoint)
        else:
            locks.enter_context(lock_run(directory))
            run_directory(self.config)  # another run of this name may have come first
            write_config(directory, asked, self.model, self._data_sha256, self.config.adaptation_rounds, dataset)
            self.finished_rounds = 0
        self._tensorboard = open_tensorboard(config, directory, self.finished_rounds)
        self._drawer = ReportDrawer(directory, self.results.leave_out_cpu)
        self._note_clients()
        self.results.write()

    def run(self) -> None:
        """All rounds, then the report."""
        certificates = CertificateWatch()
        if self.model.stored_as and self.model.reuses_query:
            with self.results.measure_seconds("features"):
                prepare_features(self.config, self.model, self.scenario.dataset)
        while self.finished_rounds < self.scenario.schedule.total_rounds or self._add_task():
            context = RoundContext(self.scenario.schedule, self.finished_rounds + 1)
            if context.round == 0 and context.task > 0:
                self.model.begin_task(len(context.schedule.tasks[context.task]))
            if self.registry.admit_new():
                self.scenario = lay_out_tasks(self.config, self.plan, self.registry)
            self._note_clients()
            certificates.look()
            report = self.train_round(context)
            if context.ends_task:
                self._evaluate(context, report)
            self._write_round(context)
        require_training(self.results.rounds)
        self.results.status = FINISHED
        self._stop_drawing()
        self.results.write()

    def train_round(self, context: RoundContext) -> RoundReport:
        """Train on the clients of one round, aggregate and refine.

        Raises:
            RunError: fewer answers than the quorum, or a task without a usable model.
        """
        clients = sample_clients(self.registry.clients, self.config, context.server_round)
        report = RoundReport(context.task + 1, context.round + 1, [client.name for client in clients])
        self.results.rounds.append(report)
        started = time.perf_counter()
        if self.results.privacy:
            record_asked(
                self._asked_path, report, releases_per_message(self.config, context.server_round, context.ends_task)
            )
        try:
            aggregator = self._collect(context, clients, report)
        finally:  # clients may have answered in a round that is cut short, and the run may never be resumed
            self.results.privacy = charge(self.results.privacy, self._asked_path, self.results.rounds)
        self.results.add_training([update.metrics for update in aggregator.updates], report)
        report.trained = bool(aggregator.updates)
        require_quorum(aggregator.problem, report, context.ends_task, self.results)
        if context.ends_task:
            entropies = [value for update in aggregator.updates for value in aggregator.entropies[update.client]]
            self.results.add_bias(context.task, entropies, local_distance(aggregator.updates))
        self._update_global_model(aggregator, context, report)
        report.seconds = time.perf_counter() - started
        return report

    def _collect(self, context: RoundContext, clients: Sequence[ClientInfo], report: RoundReport) -> RoundAggregator:
        def measure(update: Update) -> list[float]:
            if not (self.config.federated_bias and context.ends_task):
                return []
            with self.results.measure_seconds("federated_bias"):
                seen = np.array(context.seen_classes)
                return response_entropies(self.model, update, self.scenario.dataset, seen)

        aggregator = RoundAggregator(self.config, self.strategy, self.model, context, clients)
        if self.config.secure_aggregation != "off":
            train = self._packet("train", context, clients, aggregator.sent_arrays)
            aggregator.collect_sum(self._secure_sum(clients, report), train, report)
            return aggregator
        # messages would only start processes on the nodes; but a node that owes an answer needs the time
        if not aggregator.anything_to_train() and not self.transport.busy():
            report.idle = list(report.participants)
            return aggregator
        replies = self.exchange("train", context, clients, aggregator.sent_arrays, aggregator.largest_answer())
        aggregator.collect(replies, report, measure)
        return aggregator

    def _secure_sum(self, clients: Sequence[ClientInfo], report: RoundReport) -> SecureSum:
        require_few(len(clients))  # nodes may have come that were not expected
        threshold = self.config.unmask_threshold(len(clients))
        return SecureSum(self.transport, clients, threshold, self.config.round_timeout, report)

    def exchange(
        self,
        kind: Kind,
        context: RoundContext,
        clients: Sequence[ClientInfo],
        arrays: Arrays,
        largest_answer: int = SMALL_ANSWER,
    ) -> Iterable[Reply]:
        """Send a train or evaluate message to clients; replies come in any order, see :class:`Transport`."""
        packet = self._packet(kind, context, clients, arrays)
        packets = {client.node: packet for client in clients}
        replies = self.transport.exchange(kind, packets, self.config.round_timeout, largest_answer)
        return count_answers(replies, len(packets))

    def _packet(self, kind: Kind, context: RoundContext, clients: Sequence[ClientInfo], arrays: Arrays) -> Packet:
        return Packet(
            arrays=arrays,
            statistics=self.strategy.broadcast(context) if kind == "train" else {},
            config={
                "task": context.task + 1,
                "round": context.round + 1,
                "server-round": context.server_round,
                "ends-task": context.ends_task,
                "classes": context.current_classes,
                "run-config": json.dumps(self.config.for_clients()),
                "backbone-sha256": self.model.backbone.sha256,
                # the side of the images, so that a node need not build the backbone to know it
                **(self.plan.message() | {"image-size": self.model.backbone.image_size} if self.plan else {}),
                # where data are pooled, the first client that is drawn has all of them
                **({"pool": clients[0].name} if self.config.method_row.pooled else {}),
            },
        )

    def _update_global_model(self, aggregator: RoundAggregator, context: RoundContext, report: RoundReport) -> None:
        """Load the mean and refine it; a model that is not finite, or absurdly large, is dropped."""
        self.results.seconds["server_aggregate"] += aggregator.seconds
        with self.results.measure_seconds("server_aggregate"):
            if aggregator.mean.total:
                self.model.load(aggregator.mean.arrays())
        with self.results.measure_seconds("server_refine"):
            metrics = self.strategy.refine(self.model, aggregator.updates, context)
        report.server = {name: value for name, value in metrics.items() if np.isfinite(value)}
        # a computed head may hold values that no training reaches, as in a row that must never win
        computed = self.config.method_row.adapts or not self.config.method_row.objective
        limit = np.finfo(np.float32).max if computed else MAX_VALUE
        if not all((np.abs(a) <= limit).all() for a in self.model.export().values()):
            aggregator.undo()
            report.dropped = True
        if context.ends_task:
            require_usable_model(aggregator.spoiled, report, self.results)

    def _evaluate(self, context: RoundContext, report: RoundReport) -> None:
        evaluated = set[str]()
        with self.results.measure_seconds("evaluate"):
            if self.config.evaluate == "clients":
                counts, evaluated = self._count_on_clients(context, report)
            else:
                counts = count_on_server(self.model, self.scenario.dataset, context, self.results)
        self.results.add_evaluation(context.task, counts, self._count_away(counts, evaluated))

    def _count_away(self, counts: np.ndarray, evaluated: set[str]) -> np.ndarray:
        """Test images of each class, int64 [C], that are not in ``counts``, as their clients have not ``evaluated``."""
        if self.config.own_data:
            return self.results.held_by_others(evaluated)
        images = np.bincount(self.scenario.dataset.test_labels, minlength=len(counts))
        return np.maximum(images - counts.sum(axis=1), 0)

    def _count_on_clients(self, context: RoundContext, report: RoundReport) -> tuple[np.ndarray, set[str]]:
        clients, arrays, dataset = self.registry.clients, self.model.export(), self.scenario.dataset
        if self.config.secure_aggregation != "off":
            evaluate = self._packet("evaluate", context, clients, arrays)
            return sum_hidden_counts(self._secure_sum(clients, report), evaluate, dataset, context, self.config)
        replies = self.exchange("evaluate", context, clients, arrays)
        return sum_client_counts(replies, clients, dataset, context, self.config, report)

    def _add_task(self) -> bool:
        """Add one more task if nodes hold classes that the run does not know yet; returns whether it did."""
        plan = wait_for_new_classes(self.config, self.plan, self.registry)
        if not plan:
            return False
        self.plan = plan
        self.scenario = lay_out_tasks(self.config, plan, self.registry)
        log_tasks(self.scenario, first=len(plan.tasks) - 1)
        self.results.extend(self.scenario)
        self.results.status = RUNNING
        self._note_clients()
        self.results.write()
        return True

    def _note_clients(self) -> None:
        clients, absent = self.registry.clients, self.registry.absent.values()
        # of other data no test images are a client's own
        names = self.scenario.dataset.class_names if self.config.own_data else ()
        self.results.note_holders({c.name: (c.node, c.by_class_id(c.test_counts, names)) for c in clients})
        self.results.absent = [{"name": node.name, "reason": node.reason} for node in absent]
        write_nodes(self.directory, clients, absent)
        if has_fixed_images(self.config):
            self.results.note_clients([(c.name, c.class_counts) for c in clients])

    def _restore(self, checkpoint: Mapping[str, Any]) -> int:
        """Go back to the end of the last saved round; returns its number."""
        require_same_start(self.directory, self.model.backbone.sha256, self._data_sha256, self.config.data_dir)
        require_same_keys(self.config, checkpoint["keys"])
        context = RoundContext(self.scenario.schedule, checkpoint["round"])
        self.model = build_model(self.config, self.scenario.task_sizes(context.task))
        try:
            self.model.load(checkpoint["arrays"])
        except ValueError as error:
            raise ConfigError(
                f"resume = {str(self.directory)!r}: its checkpoint does not fit images or code of now ({error})."
            ) from error
        vars(self.strategy).update(checkpoint["strategy"])
        self.results.restore(checkpoint["results"])
        recorded = read_results(self.directory)
        damaged = context.server_round < len(recorded.get("rounds", []))  # its last checkpoint
        if recorded.get("status") == FINISHED and not damaged:
            self.results.status = FINISHED  # until new classes come
        require_asked_clients(self.results.privacy, self._asked_path, self.results.rounds)
        self._write_model(context)  # no round may follow
        log.info("going on after round %d of %d", context.server_round, self.scenario.schedule.total_rounds)
        return context.server_round

    def _write_round(self, context: RoundContext) -> None:
        """Write model, results and checkpoint after a round."""
        self._write_model(context)
        line = self.results.write_round()
        if self._tensorboard:
            add_round(self._tensorboard, line, self.results.matrix[context.task], context.server_round)
        self.finished_rounds = context.server_round
        self._write_checkpoint(context)
        if context.ends_task or context.server_round == 1:
            self._drawer.draw_in_background()  # so that a run that is killed leaves its pictures too
        log.info("\n".join(describe_round(line, context.server_round)))

    def _write_model(self, context: RoundContext) -> None:
        dataset, class_ids = self.scenario.dataset, context.seen_classes
        metadata = ModelMetadata(
            config=self.config.flat(),
            class_ids=class_ids,
            class_names=[dataset.class_names[c] for c in class_ids],
            task_sizes=self.scenario.task_sizes(context.task),
            image_shape=list(dataset.image_shape),
            backbone_sha256=self.model.backbone.sha256,
        )
        write_model(self.directory / MODEL, self.model.export(), metadata)

    def _write_checkpoint(self, context: RoundContext) -> None:
        attributes = {name: value for name, value in vars(self.strategy).items() if name not in ("config", "options")}
        state = {
            "round": context.server_round,
            "arrays": self.model.export(),
            "strategy": attributes,
            "results": self.results.export_state(),
            "plan": self.plan,
            "keys": self.config.flat(),
        }
        write_checkpoint(self.directory / "checkpoint", context.server_round, state)

    def fail(self, error: BaseException) -> None:
        """Save what there is and why the run ended; a full disk must not hide it."""
        if _still_finished(self.directory, error):
            return
        self.results.status = "failed"
        self.results.error = reason_of(error)
        rounds = self.results.rounds
        says_why = isinstance(error, RunError) and rounds and (rounds[-1].failures or rounds[-1].dropped)
        if rounds and not (rounds[-1].seconds or says_why):  # cut short: it would look as if all had answered
            rounds.pop()
        with contextlib.suppress(OSError):
            self.results.write()

    def draw_failed(self) -> None:
        """Draw the last pictures of a run that failed; neither a full disk nor a signal hides why it failed.

        Nothing else is written, and nothing at all if the operator, who was told, has begun to resume the run.
        """
        with contextlib.suppress(OSError, KeyboardInterrupt, SystemExit):  # Flower turns a signal into SystemExit
            self._stop_drawing()
            if read_results(self.directory).get("status") == self.results.status:
                self.draw()

    def draw(self) -> None:
        """Draw the last pictures; the run's end is recorded by then."""
        self._drawer.draw()

    def _stop_drawing(self) -> None:
        self._drawer.stop()
        if self._tensorboard:
            self._tensorboard.close()
