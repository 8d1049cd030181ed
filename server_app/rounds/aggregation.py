"""One round's answers, taken in one by one as they come and let go as soon as the run's settings allow it."""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from server_app.clients.client_info import ClientInfo
from server_app.rounds.reply_checks import InvalidReply, check_reply, too_far
from server_app.run_files.results import RoundReport
from server_app.transport.base import Reply
from strategies.averaging import WeightedMean
from strategies.base import RoundContext, Strategy, Update
from task.config.schema import Config
from task.models.model import Model
from task.scenario.client_data import learnable_classes

Measure = Callable[[Update], list[float]]


class RoundAggregator:
    """Checks each answer, averages its arrays, shows them to the method and lets them go.

    What comes of a round does not depend on the order in which its answers come: the mean knows no order, and all else
    is put into the order in which the clients were drawn.

    Attributes:
        sent: arrays of the model before the round.
        known: what the strategy knew then.
        mean: of the accepted arrays so far.
        updates: the accepted answers of clients that have trained, without their arrays.
        entropies: of their responses, as far as they are measured.
        seconds: that the mean and the method have taken so far.
    """

    def __init__(
        self, config: Config, strategy: Strategy, model: Model, context: RoundContext, drawn: Sequence[ClientInfo]
    ) -> None:
        self.sent = model.export()
        self.known = {name: copy.copy(value) for name, value in vars(strategy).items()}
        self.mean = WeightedMean()
        self.updates: list[Update] = []
        self.entropies: list[float] = []
        self.seconds = 0.0
        self._config, self._strategy, self._model, self._moment = config, strategy, model, context
        self._measured: dict[str, list[float]] = {}
        self._drawn = {member.node: member for member in drawn}
        self._spec = {name: tuple(value.shape) for name, value in model.trained_state().items()}
        self._classes = learnable_classes(config, context.schedule, context.task)

    def take(self, replies: Iterable[Reply], report: RoundReport, measure: Measure) -> None:
        """Take in all answers of the round.

        Args:
            replies: as they come, one from each drawn client.
            report: gets bytes, idle clients and failures.
            measure: entropies of an accepted update's responses, asked while its arrays are there.
        """
        held, refused = list[Update](), dict[str, str]()
        for reply in replies:
            report.bytes_up += reply.bytes_up
            report.bytes_down += reply.bytes_down
            name = self._drawn[reply.node].name
            try:
                update = self._checked(reply)
            except InvalidReply as error:
                refused[name] = str(error)
                continue
            if not update.num_examples:
                report.idle.append(name)
            elif self._config.max_update_ratio:  # the median is known when all have come
                held.append(update)
            else:
                refused |= self._settle([update], measure)
        refused |= self._settle(held, measure)
        self._put_in_order(refused, report)

    def _checked(self, reply: Reply) -> Update:
        member = self._drawn[reply.node]
        return check_reply(reply, member, self._spec, self._classes, self._moment.ends_task, self._config)

    def _settle(self, updates: Sequence[Update], measure: Measure) -> dict[str, str]:
        """Use those that do not go too far; returns why the others are refused."""
        refused = too_far(updates, self.sent, self._config)
        for update in updates:
            if update.client in refused:
                continue
            self._measured[update.client] = measure(update)
            started = time.perf_counter()
            if update.arrays:
                self.mean.add(update.arrays, self._strategy.weight(update))
            self._strategy.receive(self._model, update, self._moment)
            self.seconds += time.perf_counter() - started
            self.updates.append(replace(update, arrays={}))
        return refused

    def _put_in_order(self, refused: dict[str, str], report: RoundReport) -> None:
        place = {member.name: i for i, member in enumerate(self._drawn.values())}
        self.updates.sort(key=lambda update: place[update.client])
        self.entropies = [entropy for update in self.updates for entropy in self._measured[update.client]]
        report.idle.sort(key=place.__getitem__)
        report.failures += [{"name": name, "reason": refused[name]} for name in sorted(refused, key=place.__getitem__)]
