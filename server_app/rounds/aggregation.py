"""The answers of one round. Each is checked, averaged and shown to the method as it comes; a secure sum at once."""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from server_app.clients.client_info import ClientInfo
from server_app.rounds.reply_checks import (
    Bounds,
    InvalidReply,
    check_reply,
    check_sum,
    find_excessive,
    largest_answer,
)
from server_app.run_files.results import RoundReport
from server_app.secure_aggregation.secure_sum import SecureSum, SpoiledSum, TooFewClients
from server_app.transport.base import Reply
from strategies.averaging import WeightedMean
from strategies.base import RoundContext, Strategy, Update
from task.config.schema import Config
from task.message import Packet
from task.models.model import Model
from task.scenario.client_data import learnable_classes
from task.secure_aggregation.sum_layout import SumLayout

log = logging.getLogger(__name__)

Measure = Callable[[Update], list[float]]


class RoundAggregator:
    """Checks each answer, adds its arrays to the mean, shows it to the method and lets its arrays go.

    The outcome of a round does not depend on the order of the answers: the mean is exact in any order, and all else is
    sorted by the order in which the clients were drawn.
    """

    def __init__(
        self, config: Config, strategy: Strategy, model: Model, context: RoundContext, clients: Sequence[ClientInfo]
    ) -> None:
        self._arrays_before = model.export()
        self.sent_arrays = {name: self._arrays_before[name] for name in model.message_state()}
        self.strategy_state = {name: copy.copy(value) for name, value in vars(strategy).items()}  # before the round
        self.mean = WeightedMean()  # of the accepted arrays so far
        self.updates: list[Update] = []  # accepted answers of clients that have trained, without their arrays
        self.entropies: dict[str, list[float]] = {}  # of the local models' responses by client, as measured
        self.problem = ""  # why too few clients were left for the round's secure sum
        self.spoiled = ""  # why the round's secure sum was dropped
        self.seconds = 0.0  # that the mean and the method have taken so far
        self._config, self._strategy, self._model, self._context = config, strategy, model, context
        self._clients = {client.node: client for client in clients}
        self._order = {client.name: i for i, client in enumerate(clients)}
        self._bounds = Bounds.of(model, learnable_classes(config, context.schedule, context.task))

    def largest_answer(self) -> int:
        """Bytes that no honest answer of the round can have."""
        return largest_answer(list(self._clients.values()), self._bounds, self._config)

    def anything_to_train(self) -> bool:
        """Whether a drawn client holds an image of a class that can be learned now, by the answers to hello."""
        return any(client.class_counts[self._bounds.classes].any() for client in self._clients.values())

    def collect(self, replies: Iterable[Reply], report: RoundReport, measure: Measure) -> None:
        """Use all answers of the round, one from each drawn client; ``report`` gets bytes, idle clients and failures.

        ``measure`` gives the entropies of an accepted update's responses, and is called while its arrays are there.
        """
        waiting: list[Update] = []
        for reply in replies:
            report.bytes_up += reply.bytes_up
            report.bytes_down += reply.bytes_down
            client = self._clients[reply.node]
            try:
                update = check_reply(reply, client, self._bounds, self._context, self._config)
            except InvalidReply as error:
                report.failures.append({"name": client.name, "reason": str(error)})
                continue
            if not update.num_examples:
                report.idle.append(client.name)
            elif self._config.max_update_ratio:  # the median needs the updates of all clients
                waiting.append(update)
            else:
                self._use([update], report, measure)
        self._use(waiting, report, measure)
        self.updates.sort(key=lambda update: self._order[update.client])
        report.idle.sort(key=self._order.__getitem__)
        report.failures.sort(key=lambda failed: self._order[failed["name"]])

    def collect_sum(self, secure_sum: SecureSum, train: Packet, report: RoundReport) -> None:
        """Use the sum over the clients of the round, as if it were the answer of one client with all their images.

        A sum that cannot be right is dropped, and the round with it.
        """
        config, context = self._config, self._context
        layout = SumLayout.of(config, context.server_round, context.ends_task, self._model, self._bounds.classes)
        try:
            total, survivors = secure_sum.collect("train", train, layout.length, config.secure_aggregation_range)
            answer = layout.to_answer(total)
            update = check_sum(answer, survivors, self._bounds, config)
            if update:
                self._use([replace(update, metrics={**update.metrics, **secure_sum.seconds})], report, lambda _: [])
        except TooFewClients as error:
            self.problem = str(error)
        except (SpoiledSum, InvalidReply) as error:
            report.dropped, self.spoiled = True, str(error)
            log.warning("the round is dropped: %s", error)
        report.failures.sort(key=lambda failed: self._order[failed["name"]])

    def _use(self, updates: Sequence[Update], report: RoundReport, measure: Measure) -> None:
        """Use the updates whose norms are within the limits; the others become failures."""
        refused = find_excessive(updates, self.sent_arrays, self._config)
        report.failures += [{"name": name, "reason": reason} for name, reason in refused.items()]
        for update in updates:
            if update.client in refused:
                continue
            self.entropies[update.client] = measure(update)
            started = time.perf_counter()
            if update.arrays:
                self.mean.add(update.arrays, self._strategy.weight(update))
            self._strategy.receive(self._model, update, self._context)
            self.seconds += time.perf_counter() - started
            self.updates.append(replace(update, arrays={}))

    def undo(self) -> None:
        """Put the model and the strategy back as they were before the round."""
        self._model.load(self._arrays_before)
        vars(self._strategy).clear()
        vars(self._strategy).update(self.strategy_state)
