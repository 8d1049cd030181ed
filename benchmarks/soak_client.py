"""The ClientApp of benchmarks.soak: the real one, but a share of its trainings, drawn by seed, ends in an exception.

Which ones depends on the client and the round alone, so that workers in any number fail at the same places.
"""

import os
from random import Random

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.app import app as honest
from client_app.flower_records import from_records

SHARE = "FCIL_SOAK_FAILURES"  # environment variable of the whole soak

app = ClientApp()
app.query("hello")(honest)
app.evaluate()(honest)


def fails(client: int, server_round: int) -> bool:
    """Whether a client fails in this round."""
    return Random(f"{client} {server_round}").random() < float(os.environ[SHARE])


@app.train()
def train(message: Message, context: Context) -> Message:
    """As the real one, if the client does not fail."""
    if fails(int(context.node_config["partition-id"]), int(from_records(message.content).config["server-round"])):  # type: ignore[arg-type]  # both are whole numbers
        raise RuntimeError("the power went")
    return honest(message, context)
