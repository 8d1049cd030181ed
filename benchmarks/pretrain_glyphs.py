"""Pre-train the bundled demo backbone on rendered letters and symbols; contains no digit and no downloaded file.

    python -m benchmarks.pretrain_glyphs      # writes task/assets/vit_glyphs*; 27 minutes on one busy core

The classes are letters of five scripts, each rendered in the twelve DejaVu faces that matplotlib ships, under strong
augmentation. Look-alikes (Latin A, Greek Alpha, Cyrillic A) are merged by comparing their renderings, so that no label
contradicts another. Half of the images are reduced to 8 x 8 pixels and back, the resolution of scanned hand-writing.
"""

import argparse
import base64
import hashlib
import json
import logging
import time
import unicodedata
from pathlib import Path

import matplotlib
import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont
from timm.models import VisionTransformer
from torch import Tensor, nn

from benchmarks.probe import probe
from task.config.parsing import parse
from task.utils.assets import ASSETS

log = logging.getLogger(__name__)

SCRIPTS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN")
MASTER = 48  # pixels of a rendered letter before augmentation
SIDE = 32
ARCHITECTURE = {"img_size": SIDE, "patch_size": 8, "embed_dim": 112, "depth": 6, "num_heads": 4}
PART_BYTES = 640_000  # of weights in a file: Flower Hub takes files of at most 1 MiB, and base64 adds a third


def font_paths() -> list[Path]:
    """The twelve text faces of DejaVu inside the installed matplotlib."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted(p for p in folder.glob("DejaVu*.ttf") if "Display" not in p.name)


def letters(paths: list[Path]) -> list[str]:
    """Undecorated letters of SCRIPTS that every face can draw."""
    common = set.intersection(*(set(TTFont(p).getBestCmap()) for p in paths))
    return [c for c in map(chr, sorted(common)) if _is_plain_letter(c)]


def _is_plain_letter(char: str) -> bool:
    plain = unicodedata.category(char) in ("Lu", "Ll", "Lo") and not unicodedata.decomposition(char)
    return plain and unicodedata.name(char, "").startswith(SCRIPTS)


def render(char: str, font: ImageFont.FreeTypeFont) -> np.ndarray:
    """White letter on black, centred by its ink, longest side 36 of MASTER pixels; uint8 [MASTER, MASTER]."""
    left, top, right, bottom = font.getbbox(char)
    ink = Image.new("L", (int(right - left), int(bottom - top)))
    ImageDraw.Draw(ink).text((-left, -top), char, font=font, fill=255)
    scale = 36 / max(ink.size)
    ink = ink.resize((max(1, round(ink.width * scale)), max(1, round(ink.height * scale))))
    canvas = Image.new("L", (MASTER, MASTER))
    canvas.paste(ink, ((MASTER - ink.width) // 2, (MASTER - ink.height) // 2))
    return np.asarray(canvas)


def glyphs(limit: float = 0.03) -> Tensor:
    """Distinct letters as uint8 [classes, faces, MASTER, MASTER].

    Two letters are one class when their renderings differ by a mean squared error below ``limit`` over all faces.
    """
    fonts = [ImageFont.truetype(str(p), 64) for p in font_paths()]
    drawn = np.stack([[render(c, f) for f in fonts] for c in letters(font_paths())])
    flat = torch.from_numpy(drawn.reshape(len(drawn), -1)).float() / 255
    close = torch.cdist(flat, flat).square() / flat.shape[1] < limit
    first = close.float().argmax(dim=1) == torch.arange(len(flat))
    return torch.from_numpy(drawn)[first]


def augment(images: Tensor, rng: torch.Generator) -> Tensor:
    """uint8 [B, MASTER, MASTER] -> float [B, 1, SIDE, SIDE] in 0..1, each image distorted on its own."""
    x = _stroke_width(images[:, None].float() / 255, rng)
    x = F.grid_sample(x, _distortion(len(x), rng), align_corners=False)
    coarse = F.interpolate(F.adaptive_avg_pool2d(x, 8), SIDE, mode="bicubic", align_corners=False)
    half = torch.rand(len(x), 1, 1, 1, generator=rng) < 0.5
    x = torch.where(half, coarse, x)
    contrast = 0.6 + 0.6 * torch.rand(len(x), 1, 1, 1, generator=rng)
    offset = 0.15 * torch.rand(len(x), 1, 1, 1, generator=rng)
    noise = 0.08 * torch.rand(len(x), 1, 1, 1, generator=rng) * torch.randn(x.shape, generator=rng)
    return (x * contrast + offset * (1 - x) + noise).clamp(0, 1)


def _stroke_width(x: Tensor, rng: torch.Generator) -> Tensor:
    """Thicken a third of the letters and thin a quarter, by blending with a 3 x 3 dilation or erosion."""
    draw, amount = torch.rand(2, len(x), 1, 1, 1, generator=rng)
    thick = F.max_pool2d(x, 5, 1, 2)
    thin = -F.max_pool2d(-x, 3, 1, 1)
    x = torch.where(draw < 0.33, torch.lerp(x, thick, amount), x)
    return torch.where(draw > 0.75, torch.lerp(x, thin, amount * 0.7), x)


def _distortion(batch: int, rng: torch.Generator) -> Tensor:
    """Sampling grid [B, SIDE, SIDE, 2]: random affine map plus a smooth elastic displacement."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(batch, generator=rng)

    angle, shear = uniform(-0.35, 0.35), uniform(-0.4, 0.4)
    sx, sy = uniform(0.7, 1.4), uniform(0.7, 1.2)
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([sx * cos, sx * (shear * cos - sin), uniform(-0.15, 0.15)], dim=1)
    row_y = torch.stack([sy * sin, sy * (shear * sin + cos), uniform(-0.15, 0.15)], dim=1)
    grid = F.affine_grid(torch.stack([row_x, row_y], dim=1), [batch, 1, SIDE, SIDE], align_corners=False)
    bumps = torch.randn(batch, 2, 5, 5, generator=rng) * 0.09
    elastic = F.interpolate(bumps, SIDE, mode="bicubic", align_corners=False)
    return grid + elastic.permute(0, 2, 3, 1)


def pretrain(model: nn.Module, masters: Tensor, steps: int, seed: int) -> None:
    """Cross-entropy on (letter, face) drawn uniformly; AdamW, one cycle to 2e-3, batch 256; logs every 250 steps."""
    rng = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    started, correct, seen = time.monotonic(), 0, 0
    model.train()
    for step in range(1, steps + 1):
        labels = torch.randint(masters.shape[0], (256,), generator=rng)
        faces = torch.randint(masters.shape[1], (256,), generator=rng)
        images = (augment(masters[labels, faces], rng).expand(-1, 3, -1, -1) - 0.5) / 0.5
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        correct, seen = correct + int((logits.argmax(1) == labels).sum()), seen + len(labels)
        if step % 250 == 0:
            log.info(
                "step %d loss %.3f letters %.3f %.0f s", step, loss.item(), correct / seen, time.monotonic() - started
            )
            correct, seen = 0, 0


def write_metadata(model: VisionTransformer, recipe: dict[str, int | str], path: Path) -> None:
    """Write the weights as base64 text, in half precision and without classifier, and ``path``, their metadata.

    The metadata are the architecture, the recipe, the accuracies of a probe, and the digest and files of the weights.
    """
    state = {name: value.half() for name, value in model.state_dict().items() if not name.startswith("head.")}
    raw = safetensors.torch.save(state)
    metadata = {
        "architecture": ARCHITECTURE,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "recipe": recipe,
        "probe": {},
        "sha256": hashlib.sha256(raw).hexdigest(),
        "parts": write_parts(raw, path),
    }
    path.write_text(json.dumps(metadata, indent=1) + "\n")
    trained = probe(parse({"method": "ncm", "backbone": path.stem}))
    untrained = probe(parse({"method": "ncm", "backbone": path.stem, "backbone-weights": "random"}))
    metadata["probe"] = {"digits test split, frozen features": trained, "the same, random weights": untrained}
    path.write_text(json.dumps(metadata, indent=1) + "\n")
    log.info("%s %s", path, metadata["probe"])


def write_parts(raw: bytes, metadata: Path) -> list[str]:
    """Write weights in base64, PART_BYTES in a file; returns the files' names as seen from the file ``metadata``."""
    names = []
    (metadata.parent / metadata.stem).mkdir(exist_ok=True)
    for number, start in enumerate(range(0, len(raw), PART_BYTES), 1):
        names.append(f"{metadata.stem}/{number}.json")
        text = base64.b64encode(raw[start : start + PART_BYTES]).decode()
        (metadata.parent / names[-1]).write_text(json.dumps(text) + "\n")
    return names


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    masters = glyphs()
    log.info("%d classes in %d faces", masters.shape[0], masters.shape[1])
    model = VisionTransformer(num_classes=len(masters), **ARCHITECTURE)
    pretrain(model, masters, args.steps, args.seed)
    recipe: dict[str, int | str] = {
        "command": f"python -m benchmarks.pretrain_glyphs --steps {args.steps} --seed {args.seed}",
        "letters": len(masters),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    write_metadata(model, recipe, ASSETS / "vit_glyphs.json")


if __name__ == "__main__":
    _main()
