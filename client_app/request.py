"""A message that came to a node, with the settings and the list of images that its answer needs; imports no torch."""

from dataclasses import dataclass

from client_app.node import Node, client_name, own_data_dir, state_dir
from task.config.schema import Config
from task.data.node_images import Inventory, load_inventory, scan_images
from task.message import Packet


class DivergedError(RuntimeError):
    """The local loss became NaN or infinite."""


@dataclass(frozen=True)
class Request:
    """A message that came to a node, with the run's settings as they are on this node."""

    packet: Packet
    config: Config
    node: Node

    def number(self, name: str) -> int:
        """A whole number in the message's config."""
        return int(str(self.packet.config[name]))

    @property
    def task(self) -> int:
        """The task, counted from 0; in the message it counts from 1."""
        return self.number("task") - 1

    @property
    def client(self) -> str:
        """The client's name."""
        return client_name(self.config, self.node)

    def scan_images(self, previous: Inventory | None = None) -> Inventory:
        """Scan the node's own images; with an earlier list, find which images of that list have been lost."""
        config, folder = self.config, own_data_dir(self.config, self.node)
        share, max_pixels = config.unreadable_share, config.max_image_pixels
        return scan_images(folder, state_dir(config, self.node), share, self.node.run, previous, max_pixels)

    def last_scan(self) -> Inventory | None:
        """The list of the last scan in this run; None if there is none."""
        return load_inventory(own_data_dir(self.config, self.node), state_dir(self.config, self.node), self.node.run)
