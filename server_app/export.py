"""Model files for use elsewhere: safetensors with all weights, and ONNX."""

import importlib.util
from pathlib import Path

import torch

from server_app.errors import ExportError
from server_app.run_files.writers import write_model
from task.inference import Classifier, Predictor
from task.models.model import to_arrays
from task.utils.atomic import write_atomically

OPSET = 18


def write_self_contained(predictor: Predictor, path: Path) -> None:
    """Write a safetensors file with all arrays and the backbone; ``load_predictor`` reads it without a network.

    Raises:
        OSError: it cannot be written; an earlier file stays.
    """
    write_model(path, to_arrays(Classifier(predictor.model).tensors()), predictor.metadata)


def require_onnx() -> None:
    """Check that ONNX files can be written.

    Raises:
        ExportError: a package is missing; says how to install it.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"--onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def write_onnx(predictor: Predictor, path: Path) -> None:
    """Write an ONNX model: ``images`` float32 [B, 3, H, W] in 0 .. 1 -> ``probabilities`` [B, C], for any B.

    H and W are the backbone's; normalisation is part of the model, resizing is not (:meth:`Predictor.pixels` does it).
    It has the metadata of the safetensors file, class names included.

    Raises:
        ExportError: torch cannot express the model.
        OSError: it cannot be written; an earlier file stays.
    """
    side = predictor.model.backbone.image_size
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                Classifier(predictor.model).eval(),
                (torch.rand(2, 3, side, side, device=predictor.model.device),),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["images"],
                output_names=["probabilities"],
                opset_version=OPSET,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(f"torch {torch.__version__} could not write this model as ONNX: {error}") from error
    assert program is not None  # it is None only without dynamo
    program.model.metadata_props.update(predictor.metadata.as_header())
    write_atomically(path, program.model_proto.SerializeToString())
