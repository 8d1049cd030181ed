"""Metadata in a model file: all that is needed to use its arrays."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from task.message import Scalar

MODEL = "model.safetensors"  # in the folder of a run


@dataclass(frozen=True)
class ModelMetadata:
    """Metadata of a model, written into its file as JSON texts.

    Attributes:
        config: the resolved run keys.
        class_ids: class in the data set of each head row.
        class_names: name of each head row's class.
        task_sizes: number of classes of each task that has begun.
        image_shape: height and width in pixels of the stored images, before they are resized for the backbone.
        backbone_sha256: digest of the weights that the backbone started from.
    """

    config: dict[str, Scalar]
    class_ids: list[int]
    class_names: list[str]
    task_sizes: list[int]
    image_shape: list[int]
    backbone_sha256: str

    def as_header(self) -> dict[str, str]:
        """One JSON text for each attribute."""
        return {name: json.dumps(value) for name, value in asdict(self).items()}

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> Self:
        """The inverse of :meth:`as_header`.

        Raises:
            KeyError, ValueError: something is missing, or is no JSON.
        """
        return cls(**{name: json.loads(metadata[name]) for name in cls.__dataclass_fields__})
