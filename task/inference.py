"""Class names and probabilities of new images by the model in a run's folder or an exported file."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from task.config.parsing import parse
from task.config.schema import Config
from task.data.images import fit_image, read_rgb, to_rgb
from task.keys import ConfigError, ModelError
from task.message import Arrays
from task.models.device import resolve_device
from task.models.feature_cache import BATCH
from task.models.load import build_backbone
from task.models.metadata import MODEL, ModelMetadata
from task.models.model import Model, build_model, overwrite
from task.models.preprocessing import normalise, resize

Picture = str | Path | Image.Image | np.ndarray


@dataclass(frozen=True)
class Predictions:
    """Answers for N images: softmax over the C classes seen, float32 [N, C], not calibrated, and their names."""

    probabilities: np.ndarray
    class_names: list[str]

    @property
    def names(self) -> list[str]:
        """The most probable class of each image."""
        return [self.class_names[c] for c in self.probabilities.argmax(axis=1)]

    def top(self, number: int) -> list[list[tuple[str, float]]]:
        """For each image the ``number`` most probable classes, or all if there are fewer, and their probabilities."""
        best = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :number]
        return [
            [(self.class_names[c], float(row[c])) for c in classes]
            for row, classes in zip(self.probabilities, best, strict=True)
        ]


class Classifier(nn.Module):
    """The parts of a model that prediction needs, as one module: its tensors are saved in a self-contained file.

    It computes in float32, also if the run's precision was bf16.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.backbone, self.prompt, self.head = model.backbone, model.prompt, model.head
        single = copy.copy(model)
        single.precision = "fp32"
        self._model = [single]  # in a list, so that it is no sub-module: its parts are sub-modules already

    def forward(self, images: Tensor) -> Tensor:
        """Pixels [B, 3, image_size, image_size] in 0 .. 1 -> probabilities [B, C]."""
        return self._model[0](normalise(images, self.backbone)).softmax(dim=1)

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, also the backbone's and those drawn from the seed."""
        return {name: t.detach() for name, t in [*self.named_parameters(), *self.named_buffers()]}


class Predictor:
    """A trained model in evaluation mode; images are prepared as in the run's evaluation."""

    def __init__(self, model: Model, metadata: ModelMetadata) -> None:
        self.model, self.metadata = model, metadata

    @property
    def class_names(self) -> list[str]:
        """Classes that can be predicted, in the order in which they were learned."""
        return self.metadata.class_names

    def read(self, image: Picture) -> np.ndarray:
        """An image as it would be stored in the run's data set, uint8 [H, W, 3].

        Args:
            image: path of an image file, PIL image, or uint8 array [H, W], [H, W, 1] or [H, W, 3]; of any size.

        Raises:
            ConfigError: a file that is missing or no image; names it.
            ValueError: an array of another type or shape.
        """
        max_pixels = int(self.metadata.config["max-image-pixels"])
        return fit_image(_rgb(image, max_pixels), *self.metadata.image_shape)

    def pixels(self, images: Sequence[Picture] | np.ndarray) -> Tensor:
        """Images, see :meth:`read`, as an exported ONNX model takes them, float32 [N, 3, side, side] in 0 .. 1."""
        _require_list(images)
        stored = np.stack([self.read(image) for image in images])
        on_device = torch.from_numpy(stored).permute(0, 3, 1, 2).to(self.model.device)
        return resize(on_device, self.model.backbone.image_size)

    @torch.inference_mode()
    def predict(self, images: Sequence[Picture] | np.ndarray) -> Predictions:
        """Classes of N images, each as in :meth:`read`; each answer depends on its own image only.

        Raises:
            TypeError: one image instead of a list.
        """
        _require_list(images)
        parts = [np.empty((0, len(self.class_names)), np.float32)]
        for start in range(0, len(images), BATCH):
            pixels = self.pixels(images[start : start + BATCH])
            parts.append(self.model(normalise(pixels, self.model.backbone)).softmax(dim=1).cpu().numpy())
        return Predictions(np.concatenate(parts), self.class_names)


def _require_list(images: object) -> None:
    # an array [H, W] is one grey image, and one of three dimensions whose last is 1, 3 or 4 one image [H, W, channels]:
    # N grey images [N, H, W] are hardly ever so narrow
    one_array = isinstance(images, np.ndarray) and (images.ndim == 2 or images.shape[2:] in ((1,), (3,), (4,)))
    if one_array or isinstance(images, str | Path | Image.Image):
        raise TypeError("images must be a list: of one image, [image]")


def load_predictor(path: str | Path, device: str = "auto") -> Predictor:
    """Load the model of a run, also of an unfinished one, or of a file that ``fcil export`` wrote.

    Args:
        path: the run's folder, its model.safetensors, or the exported file.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        ModelError: no such file, damaged, of another version, or the backbone's weights are not those of the run.
        ConfigError: the backbone's weights cannot be had (an exported file has them), or there is no such device.
    """
    file = Path(path) / MODEL if Path(path).is_dir() else Path(path)
    arrays, metadata, config = _read(file)
    exported = "backbone.mean" in arrays
    replaced = exported or config.trains_backbone  # by the file's own weights, so that none are fetched
    weights, used = "random" if replaced else config.backbone_weights, str(resolve_device(device))
    try:
        backbone = build_backbone(config.backbone, weights, config.image_size, used, config.seed)
    except ConfigError as error:
        if replaced:
            raise
        raise ConfigError(
            f"{error} A model needs the weights that it was trained with, where they were then; a file of fcil export "
            "has them."
        ) from error
    if not replaced and backbone.sha256 != metadata.backbone_sha256:
        raise ModelError(
            f"backbone-weights = {weights!r} of {config.backbone!r} have the SHA-256 {backbone.sha256[:12]}, but the "
            f"model was trained on {metadata.backbone_sha256[:12]}: put those weights back."
        )
    model = build_model(config, metadata.task_sizes, backbone)
    try:
        if exported:
            overwrite(Classifier(model).tensors(), arrays)
        else:
            model.load(arrays)
    except ValueError as error:
        raise ModelError(f"{file} does not fit its own run keys: {error}.") from error
    return Predictor(model, metadata)


def _read(file: Path) -> tuple[Arrays, ModelMetadata, Config]:
    try:
        with safe_open(file, framework="numpy") as content:
            metadata = ModelMetadata.read(content.metadata() or {})
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        if spoiled := [name for name, a in arrays.items() if a.dtype.kind == "f" and not np.isfinite(a).all()]:
            raise ValueError(f"{spoiled[0]} holds values that are not finite")
        return arrays, metadata, parse(metadata.config)
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read ({error}): name the folder of a run that has come through its first round, or a "
            "file of fcil export."
        ) from error
    except ConfigError as error:
        raise ModelError(f"{file} is of another version, or of a method that is not here: {error}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file} is damaged or no model of fcil run or fcil export ({error!r}).") from error


def _rgb(image: Picture, max_pixels: int) -> Image.Image:
    if isinstance(image, str | Path):
        return read_rgb(str(image), max_pixels)
    if isinstance(image, Image.Image):
        return to_rgb(image)
    grey = image.ndim == 2 or image.shape[2:] == (1,)
    if image.dtype != np.uint8 or not image.size or not (grey or (image.ndim == 3 and image.shape[2] == 3)):
        raise ValueError(f"an array must be uint8 [H, W, 3] or [H, W], but this is {image.dtype} {list(image.shape)}")
    return Image.fromarray(image.reshape(image.shape[:2]) if grey else image).convert("RGB")
