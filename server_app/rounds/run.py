"""One run from first hello to last picture: the only place that owns the round loop."""

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from server_app.clients.class_names import common_shape
from server_app.clients.client_info import ClientInfo
from server_app.clients.hello import wait_for_nodes
from server_app.clients.registry import ClientRegistry
from server_app.clients.sampling import sample_clients
from server_app.errors import RunError
from server_app.privacy.account import charge, open_account, record_asked, require_asked_clients
from server_app.report.write import PicturesUnavailable, write_report
from server_app.rounds.aggregation import RoundAggregator
from server_app.rounds.federated_bias import local_distance, response_entropies
from server_app.rounds.progress import describe_round
from server_app.rounds.reply_checks import LARGEST, InvalidReply, check_counts
from server_app.run_files.checkpoints import read_checkpoint, write_checkpoint
from server_app.run_files.paths import claim, run_directory
from server_app.run_files.results import Results, RoundReport, mean_or_none
from server_app.run_files.resume import require_same_backbone
from server_app.run_files.tensorboard import TensorBoardWriter, require_tensorboard
from server_app.run_files.writers import write_config, write_model
from server_app.transport.base import Reply, Transport, in_order
from strategies.base import RoundContext, Strategy, Update
from task.config.parsing import ignored_keys, set_num_clients
from task.config.schema import APPEARING, Config
from task.message import Arrays, Kind, Packet
from task.methods import load_class
from task.models.evaluation import confusion_counts
from task.models.metadata import MODEL, ModelMetadata
from task.models.model import build_model
from task.scenario.client_data import client_task_data, has_fixed_images
from task.scenario.scenario import Scenario, build_scenario
from task.scenario.task_plan import TaskPlan, first_task_plan
from task.utils.versions import code_sha256

log = logging.getLogger(__name__)

POLL = 30.0  # seconds between two looks for new classes


def run_experiment(config: Config, transport: Transport, initial: Arrays | None = None) -> Path:
    """Run everything that ``config`` says.

    Args:
        config: the resolved run keys.
        transport: reaches the clients.
        initial: arrays to start from instead of the seeded ones; names and shapes of the first task's.

    Returns:
        the run's directory.

    Raises:
        ConfigError: data, weights or settings cannot be used; raised before anything is written.
        RunError: no quorum, or clients that cannot work together.
    """
    require_tensorboard(config)
    torch.set_num_threads(config.threads)
    directory = run_directory(config)
    log.info("results go to %s", directory)
    if unread := ignored_keys(config):
        log.warning("method %s trains nothing locally and ignores %s", config.method, ", ".join(unread))
    with contextlib.ExitStack() as held:
        if config.resume:
            held.enter_context(claim(directory))
        run = Run(config, transport, directory, initial, held)
        try:
            run.run()
        except BaseException as error:
            run.fail(error)
            raise
    return directory


class Run:
    """State of one run: the global model, the method's server half, and what has been measured."""

    def __init__(
        self,
        config: Config,
        transport: Transport,
        directory: Path,
        initial: Arrays | None,
        held: contextlib.ExitStack,
    ) -> None:
        # settings, weights, data and partitions that cannot work end the run here, before it waits for anybody
        backbone = build_model(config, []).backbone
        dataset, account = None if config.own_data else build_scenario(config).dataset, open_account(config)
        # what has begun goes on at night too, when nobody is there to start a node that failed
        least = config.quorum if config.resume else None
        nodes = wait_for_nodes(transport, config.num_clients, config.start_timeout, least)
        self.config = set_num_clients(config, config.num_clients or len(nodes))
        self.transport, self.directory = transport, directory
        if dataset:
            client_task_data(self.config, client=0, task=0, round=0)
        self.registry = ClientRegistry(transport, nodes, self.config, dataset, (backbone.sha256, code_sha256()))
        self.strategy: Strategy = load_class(self.config.row.server)(self.config)
        saved = read_checkpoint(directory / "checkpoint") if config.resume else None
        self.plan = self._first_plan(saved, backbone.image_size)
        self.scenario = self._laid_out()
        self._announce(0)
        self.model = build_model(self.config, self.scenario.task_sizes(0))
        if initial:
            self.model.load(initial)
        self.results = Results(directory, self.config, self.scenario)
        self.results.privacy = account
        self._note_members()
        if self.results.sharing:
            log.info("each client has %(common)d common classes and %(private)d private ones", self.results.sharing)
            log.info("%(overlap)d of the private places repeat a class of another client", self.results.sharing)
        self.done = self._restored(saved) if saved else self._begun(held)
        self.board = TensorBoardWriter(config, directory, self.done)
        self._artist, self._drawing = ThreadPoolExecutor(1, "report"), Future[None]()
        self.results.write()

    def _first_plan(self, saved: Mapping[str, Any] | None, side: int) -> TaskPlan | None:
        if not self.config.own_data:
            return None
        members = self.registry.members
        named = [name for m in members for name in m.classes]
        return saved["plan"] if saved else first_task_plan(self.config, named, common_shape(members, side))

    def _laid_out(self) -> Scenario:
        """The scenario of the present plan, with the members placed in it."""
        scenario = build_scenario(self.config, self.plan)
        if self.plan:
            self.registry.place(self.plan.class_names)
            ignored = {name for m in self.registry.members for name in m.classes} - set(self.plan.class_names)
            if ignored and self.config.class_order != APPEARING:
                log.warning("not in the plan of this run, so left out: %s", ", ".join(sorted(ignored)))
        return scenario

    def _announce(self, first: int) -> None:
        for task, classes in enumerate(self.scenario.schedule.tasks[first:], first + 1):
            log.info("classes of task %d: %s", task, ", ".join(self.scenario.dataset.class_names[c] for c in classes))

    def _note_members(self) -> None:
        self.results.absent = self.registry.absent
        if has_fixed_images(self.config):
            members = self.registry.members
            self.results.clients = [{"name": m.name, "class_counts": m.class_counts.tolist()} for m in members]

    def _begun(self, held: contextlib.ExitStack) -> int:
        held.enter_context(claim(self.directory))
        run_directory(self.config)  # another run of this name may have come first
        write_config(self.directory, self.config, self.model)
        return 0

    def _restored(self, state: Mapping[str, Any]) -> int:
        """Take up the last whole round; returns its number."""
        require_same_backbone(self.directory, self.model.backbone.sha256)
        context = RoundContext(self.scenario.schedule, state["round"])
        self.model = build_model(self.config, self.scenario.task_sizes(context.task))
        self.model.load(state["arrays"])
        vars(self.strategy).update(state["strategy"])
        self.results.restore(state["results"])
        require_asked_clients(self.results.privacy, self._asked, self.results.rounds)
        log.info("going on after round %d of %d", state["round"], self.scenario.schedule.total_rounds)
        return context.server_round

    @property
    def _asked(self) -> Path:
        return self.directory / "checkpoint" / "asked.jsonl"

    def _save(self, context: RoundContext) -> None:
        memory = {name: value for name, value in vars(self.strategy).items() if name not in ("config", "options")}
        state = {
            "round": context.server_round,
            "arrays": self.model.export(),
            "strategy": memory,
            "results": self.results.memory(),
            "plan": self.plan,
        }
        write_checkpoint(self.directory / "checkpoint", context.server_round, state)

    def run(self) -> None:
        """All rounds, then the pictures."""
        while self.done < self.scenario.schedule.total_rounds or self._classes_appeared():
            context = RoundContext(self.scenario.schedule, self.done + 1)
            if context.round == 0 and context.task > 0:
                self.model.begin_task(len(context.schedule.tasks[context.task]))
            if self.registry.admit_new():
                self._laid_out()
                self._note_members()
            report = self._round(context)
            if context.ends_task:
                self._evaluate(context, report)
            self._write_model(context)
            line = self.results.write_round()
            self.board.add(line, self.results.matrix[context.task], context.server_round)
            self.done = context.server_round
            self._save(context)
            if context.ends_task or context.server_round == 1:
                self._draw_aside()  # so that a run that is killed leaves its pictures too
            log.info("\n".join(describe_round(line, context.server_round)))
        self.results.status = "finished"
        self._conclude()

    def _classes_appeared(self) -> bool:
        """Whether nodes hold classes that the run does not know, which become one more task."""
        if not self.plan or self.config.class_order != APPEARING or len(self.plan.tasks) >= self.config.num_tasks:
            return False
        deadline = time.monotonic() + self.config.class_wait
        log.info("looking for new classes, for %g s at most", self.config.class_wait)
        while True:
            self.registry.admit_new()
            self.registry.ask_again()
            extended = self.plan.add_task(name for m in self.registry.members for name in m.classes)
            if extended.tasks[-1]:
                break
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(POLL, max(0.0, deadline - time.monotonic())))
        self.plan = extended
        self.scenario = self._laid_out()
        self._announce(len(extended.tasks) - 1)
        self.results.extend(self.scenario)
        self._note_members()
        return True

    def fail(self, error: BaseException) -> None:
        """Save what there is and why it ended; a disk that is full must not hide the reason."""
        self.results.status = "failed"
        self.results.error = str(error) or type(error).__name__
        with contextlib.suppress(OSError):
            self._conclude()

    def _conclude(self) -> None:
        self._artist.shutdown(cancel_futures=True)
        self.board.close()
        self.results.write()
        self._draw()

    def _draw_aside(self) -> None:
        """Draw what is on the disk while the run goes on; what has not begun to be drawn would be drawn twice."""
        self._drawing.cancel()
        self._drawing = self._artist.submit(self._draw)

    def _draw(self) -> None:
        try:
            write_report([self.directory])
        except PicturesUnavailable as error:
            log.warning("%s", error)
        except Exception:
            # a picture that cannot be drawn must not turn a finished run into a failed one
            log.exception("no report; 'fcil report %s' draws it later", self.directory)

    def _round(self, context: RoundContext) -> RoundReport:
        drawn = sample_clients(self.registry.members, self.config, context.server_round)
        report = RoundReport(context.task + 1, context.round + 1, [m.name for m in drawn])
        self.results.add_round(report)
        started = time.perf_counter()
        if self.results.privacy:
            record_asked(self._asked, report)
        found = self._gathered(context, drawn, report)
        self.results.privacy = charge(self.results.privacy, self._asked, self.results.rounds)
        self._note_clients(found.updates, report)
        self._require_quorum(report, context)
        if context.ends_task:
            self.results.add_bias(context.task, found.entropies, local_distance(found.updates))
        self._improve(found, context, report)
        report.seconds = time.perf_counter() - started
        return report

    def _gathered(self, context: RoundContext, drawn: Sequence[ClientInfo], report: RoundReport) -> RoundAggregator:
        order = np.array(context.schedule.seen_classes(context.task))

        def measure(update: Update) -> list[float]:
            if not (self.config.federated_bias and context.ends_task):
                return []
            with self._timed("federated_bias"):
                return response_entropies(self.model, [update], self.scenario.dataset, order)

        found = RoundAggregator(self.config, self.strategy, self.model, context, drawn)
        found.take(self._exchange("train", context, drawn, found.sent), report, measure)
        return found

    def _exchange(
        self, kind: Kind, context: RoundContext, members: Sequence[ClientInfo], arrays: Arrays
    ) -> Iterable[Reply]:
        packet = Packet(
            arrays=arrays,
            statistics=self.strategy.broadcast(context) if kind == "train" else {},
            config={
                "task": context.task + 1,
                "round": context.round + 1,
                "server-round": context.server_round,
                "ends-task": context.ends_task,
                "classes": context.schedule.current_classes(context.task),
                "run-config": json.dumps(self.config.for_clients()),
                "backbone-sha256": self.model.backbone.sha256,
                **(self.plan.message() if self.plan else {}),
                # of clients that pool their data, the first one drawn has all of it
                **({"pool": members[0].name} if self.config.row.pooled else {}),
            },
        )
        return self.transport.exchange(kind, {m.node: packet for m in members}, self.config.round_timeout)

    def _note_clients(self, updates: Sequence[Update], report: RoundReport) -> None:
        mine = [u.metrics for u in updates]
        trained = [m for m in mine if np.isfinite(m.get("loss", np.nan))]
        sizes = [m["num-examples"] for m in trained]
        report.train_loss = mean_or_none([m["loss"] for m in trained], sizes)
        report.train_accuracy = mean_or_none([m.get("accuracy", np.nan) for m in trained], sizes)
        for key in ("train", "statistics"):
            self.results.seconds[f"client_{key}"] += sum(float(m.get(f"seconds-{key}", 0.0)) for m in mine)

    def _require_quorum(self, report: RoundReport, context: RoundContext) -> None:
        answered, asked = len(report.participants) - len(report.failures), len(report.participants)
        problem = ""
        if answered < self.config.quorum:
            problem = f"{answered} of {asked} clients answered, the quorum is {self.config.quorum}"
        elif context.ends_task and all(r.fruitless for r in self.results.rounds if r.task == report.task):
            problem = "every client with data for the task has failed in each of its rounds"
        if problem:
            self.results.write_round()
            reasons = "; ".join(f"{f['name']}: {f['reason']}" for f in report.failures[:3])
            raise RunError(f"task {report.task}, round {report.round}: {problem}. {reasons}")

    def _improve(self, found: RoundAggregator, context: RoundContext, report: RoundReport) -> None:
        """Aggregate and refine; a result that is not finite, or absurdly large, is dropped rather than spread."""
        self.results.seconds["server_aggregate"] += found.seconds
        with self._timed("server_aggregate"):
            if found.mean.total:
                self.model.load(found.mean.arrays())
        with self._timed("server_refine"):
            measured = self.strategy.refine(self.model, found.updates, context)
        report.server = {name: value for name, value in measured.items() if np.isfinite(value)}
        # a method that trains nothing may write what no training reaches, such as a row that must never win
        limit = LARGEST if self.config.row.client else np.finfo(np.float32).max
        if not all((np.abs(a) <= limit).all() for a in self.model.export().values()):
            self.model.load(found.sent)
            vars(self.strategy).clear()
            vars(self.strategy).update(found.known)
            report.dropped = True
            if all(r.dropped for r in self.results.rounds if r.task == report.task) and context.ends_task:
                raise RunError(f"no round of task {report.task} gave a usable model: lower the server's learning rate.")

    def _evaluate(self, context: RoundContext, report: RoundReport) -> None:
        with self._timed("evaluate"):
            asked = self.config.evaluate == "clients"
            counts = self._ask_clients(context, report) if asked else self._count_here(context)
        self.results.add_evaluation(context.task, counts)

    def _count_here(self, context: RoundContext) -> np.ndarray:
        dataset = self.scenario.dataset
        order = np.array(context.schedule.seen_classes(context.task))
        return confusion_counts(self.model, dataset, order, np.arange(len(dataset.test_labels)))

    def _ask_clients(self, context: RoundContext, report: RoundReport) -> np.ndarray:
        members = self.registry.members
        answers = self._exchange("evaluate", context, members, self.model.export())
        replies = in_order(answers, [m.node for m in members])
        report.bytes_up += sum(r.bytes_up for r in replies)
        report.bytes_down += sum(r.bytes_down for r in replies)
        counts = []
        seen, whole = context.schedule.seen_classes(context.task), self.scenario.dataset
        everybody = np.bincount(whole.test_labels, minlength=len(whole.class_names))
        for member, reply in zip(members, replies, strict=True):
            try:
                most = member.held_out(whole.class_names) if self.config.own_data else everybody
                counts.append(check_counts(reply, most, seen))
            except InvalidReply as error:
                report.failures.append({"name": member.name, "reason": f"evaluation: {error}"})
        if len(counts) < self.config.quorum:
            raise RunError(
                f"{len(counts)} clients evaluated task {context.task + 1}, the quorum is {self.config.quorum}."
            )
        return np.sum(counts, axis=0)

    def _write_model(self, context: RoundContext) -> None:
        dataset, order = self.scenario.dataset, context.schedule.seen_classes(context.task)
        metadata = ModelMetadata(
            config=self.config.flat(),
            class_ids=order,
            class_names=[dataset.class_names[c] for c in order],
            task_sizes=self.scenario.task_sizes(context.task),
            image_shape=list(dataset.image_shape),
            backbone_sha256=self.model.backbone.sha256,
        )
        write_model(self.directory / MODEL, self.model.export(), metadata)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.results.seconds[name] += time.perf_counter() - started
