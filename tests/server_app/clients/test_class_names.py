"""Class names of nodes that have images of their own: what the server says of them."""

import numpy as np
import pytest

from server_app.clients.class_names import small_classes, warn_of_missing_images
from server_app.clients.client_info import ClientInfo


def client(classes: dict[str, tuple[int, int]]) -> ClientInfo:
    """One with these numbers of training and held-out images."""
    own, test = np.array(list(classes.values())).T
    return ClientInfo("a", 1, tuple(classes), own, test, own, 0, (), (), "", "", (), "", 0)


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ([{"ant": (4, 1), "bee": (0, 3)}, {"bee": (0, 2)}], ["all images of bee are held out as test images"]),
        ([{"ant": (4, 1), "bee": (0, 3)}, {"Bee": (2, 0)}], []),  # the same class in another spelling
        ([{"ant": (4, 0)}, {"bee": (0, 3)}], ["image of ant: their", "all images of bee are held out"]),
        ([{"ant": (0, 0), "bee": (1, 1)}], ["no node has held out an image of ant: their accuracy will be unknown"]),
    ],
)
def test_classes_without_test_or_training_images_are_named(
    clients: list[dict[str, tuple[int, int]]], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_missing_images([client(classes) for classes in clients])
    assert len(caplog.messages) == len(said)
    assert all(part in message for part, message in zip(said, caplog.messages, strict=True))


@pytest.mark.parametrize(
    ("least", "small", "no_others"),
    [(3, [], False), (4, ["ant"], False), (8, ["ant", "bee"], False), (10, ["ant", "bee", "cow"], True)],
)
def test_classes_of_which_no_client_has_enough_images(least: int, small: list[str], no_others: bool) -> None:
    """The largest counts are 3 of ant, 7 of bee, in two spellings, and 9 of cow; of doe all images are held out."""
    clients = [client({"ant": (3, 1), "bee": (7, 0), "doe": (0, 2)}), client({"Bee": (2, 0), "cow": (9, 1)})]
    clients.append(client({"bee": (1, 0)}))
    assert small_classes(clients, least) == (small, no_others)
