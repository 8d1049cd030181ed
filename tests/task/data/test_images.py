"""Image files that are no ordinary ones: huge, long, pipes; and the memory that decoding takes."""

import os
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

import task.data.images
from client_app.client import handle
from client_app.node import Node
from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.data.images import UnreadableImage, decode, fit_image, read_rgb, readable_formats
from task.data.node_images import scan_images
from task.inference import _rgb
from tests.helpers.own_data import OWN, paint
from tests.helpers.runs import Values, hello_message


def noise(height: int, width: int) -> Image.Image:
    """A smooth random image."""
    small = np.random.default_rng(0).integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), np.uint8)
    return Image.fromarray(small).resize((width, height))


@pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40), (33, 33), (16, 16), (9, 90), (5, 7), (90, 32)])
@pytest.mark.parametrize("size", [(16, 16), (8, 24)])
def test_an_ordinary_image_is_scaled_as_a_whole_and_cropped(height: int, width: int, size: tuple[int, int]) -> None:
    image = noise(height, width)
    scale = max(size[0] / height, size[1] / width)
    scaled = np.asarray(image.resize((max(size[1], round(width * scale)), max(size[0], round(height * scale)))))
    top, left = (scaled.shape[0] - size[0]) // 2, (scaled.shape[1] - size[1]) // 2
    assert (fit_image(image, *size) == scaled[top : top + size[0], left : left + size[1]]).all()


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_an_image_is_turned_as_its_exif_orientation_says(suffix: str, tmp_path: Path) -> None:
    """Orientation 6: stored on its left side, as by a phone held upright. Left half black: shown, the upper half is."""
    stored = np.zeros((20, 40, 3), np.uint8)
    stored[:, 20:] = 255
    exif, path = Image.Exif(), tmp_path / f"a.{suffix}"
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(stored).save(path, exif=exif)
    for image in (read_rgb(str(path)), _rgb(Image.open(path), 10**6)):
        assert image.size == (20, 40)
        assert np.asarray(image)[:15].max() < 60
        assert np.asarray(image)[25:].min() > 200


def test_grey_of_16_bits_is_turned_too_and_damaged_exif_data_is_passed_over(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    Image.fromarray(np.array([[0, 9000]], np.uint16)).save(tmp_path / "grey.png", exif=exif)
    assert np.asarray(read_rgb(str(tmp_path / "grey.png")))[0, :, 0].tolist() == [255, 0]
    noise(30, 20).save(tmp_path / "damaged.jpg", exif=b"Exif\0\0no TIFF header")
    assert read_rgb(str(tmp_path / "damaged.jpg")).size == (20, 30)


def test_of_a_long_strip_the_middle_is_scaled(tmp_path: Path) -> None:
    Image.new("RGB", (50_000, 1), (10, 20, 30)).save(tmp_path / "long.png")
    assert (decode(str(tmp_path / "long.png"), 224) == (10, 20, 30)).all()
    strip = noise(2, 300)
    upright = strip.transpose(Image.Transpose.ROTATE_90)
    assert (fit_image(strip, 16, 16) == np.asarray(strip.resize((2400, 16)))[:, 1192:1208]).all()
    assert (fit_image(upright, 16, 16) == np.asarray(upright.resize((16, 2400)))[1192:1208]).all()


def test_a_file_of_too_many_pixels_is_refused_by_its_header(tmp_path: Path) -> None:
    noise(30, 20).save(tmp_path / "whole.png")
    assert read_rgb(str(tmp_path / "whole.png"), 600).size == (20, 30)
    # what follows the header is not there: it was not read
    (tmp_path / "header.png").write_bytes((tmp_path / "whole.png").read_bytes()[:45])
    with pytest.raises(UnreadableImage, match=r"header.png.* 20 x 30 pixels, above max-image-pixels = 599"):
        read_rgb(str(tmp_path / "header.png"), 599)


def test_the_limit_is_the_keys_not_pillows(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Pillow warns above 89 million pixels, and refuses above 179."""
    for width in (10_000, 30_000):
        header = b"IHDR" + struct.pack(">IIBBBBB", width, 10_000, 8, 2, 0, 0, 0)
        path = tmp_path / f"{width}.png"
        checksum = struct.pack(">I", zlib.crc32(header))
        path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + checksum + bytes(4) + b"IDAT")
        with pytest.raises(UnreadableImage, match=f"{width} x 10000 pixels, above max-image-pixels = 50000000"):
            read_rgb(str(path))
    assert not recwarn.list


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA"])
def test_what_is_transparent_is_white(mode: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Wholly, by 128 of 255, and not at all: 255 - (255 - 40) * 128 / 255 = 147."""
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 40, 40, 40, 40, 40])
    image.save(tmp_path / "a.png", transparency=bytes([0, 128, 255]))
    if mode != "P":
        Image.open(tmp_path / "a.png").convert("RGBA").convert(mode).save(tmp_path / "a.png")
    assert np.asarray(read_rgb(str(tmp_path / "a.png"))).tolist() == [[[255] * 3, [147] * 3, [40] * 3]]
    assert not recwarn.list


def test_a_file_that_cannot_be_read_is_found_before_a_run_begins(tmp_path: Path, tiny: Values) -> None:
    for name in ("ant", "bee"):
        paint(tmp_path / "data" / name, 10)
    values = tiny | {"dataset": "folder", "data-dir": str(tmp_path / "data"), "num-tasks": 1, "num-clients": 2}
    values |= {"output-dir": str(tmp_path / "runs")}
    files = sorted((tmp_path / "data").rglob("*.png"))
    for file in files[::5]:
        file.write_bytes(file.read_bytes()[:45])
    with pytest.raises(UnreadableImage, match=r"bee.*replace it or take it away. 4 files in all\.") as caught:
        run_experiment(parse(values), InProcessTransport(2))
    assert all(str(file) in str(caught.value) for file in files[::5])
    assert not list((tmp_path / "runs").glob("*/*"))
    for file in files[::5]:
        shutil.copy(files[1], file)
    run_experiment(parse(values), InProcessTransport(2))


def test_a_format_that_hides_another_image_is_not_opened(tmp_path: Path) -> None:
    """The header of an icon may say 16 x 16, and Pillow decodes a PNG of any size in it while it opens the file."""
    path, small, large = tmp_path / "icon.png", tmp_path / "small.ico", tmp_path / "large.png"
    Image.new("L", (16, 16)).save(small, sizes=[(16, 16)])
    Image.new("L", (3000, 3000)).save(large)
    head = bytearray(small.read_bytes()[:22])
    head[14:18] = large.stat().st_size.to_bytes(4, "little")
    path.write_bytes(head + large.read_bytes())
    with Image.open(path) as icon:  # so it would be
        assert icon.size == (3000, 3000)
    with pytest.raises(UnreadableImage, match=r"icon.png.*cannot identify image file"):
        read_rgb(str(path), 1000)


def test_a_large_jpeg_is_decoded_at_a_smaller_scale(tmp_path: Path) -> None:
    path, image = str(tmp_path / "large.jpg"), noise(160, 240)
    image.save(path, quality=95)
    with Image.open(path) as plain:
        assert (np.asarray(read_rgb(path, 38_400)) == np.asarray(plain)).all()
    for limit, size in {38_399: (120, 80), 9_600: (120, 80), 9_599: (60, 40), 600: (30, 20)}.items():
        small = read_rgb(path, limit)
        assert small.size == size
        assert np.abs(np.asarray(small).astype(int) - np.asarray(image.resize(size, Image.Resampling.BOX))).mean() < 3
    with pytest.raises(UnreadableImage, match="above max-image-pixels = 599"):
        read_rgb(path, 599)
    image.save(path, progressive=True)  # its coefficients are held in memory at full size
    with pytest.raises(UnreadableImage, match="240 x 160 pixels, above max-image-pixels = 38399"):
        read_rgb(path, 38_399)


def test_a_jpeg_whose_scaled_side_is_rounded_up_is_scaled_once_more(tmp_path: Path) -> None:
    """141 pixels are 71 at a half, and 71 x 71 = 5041."""
    noise(141, 141).save(path := str(tmp_path / "a.jpg"))
    assert read_rgb(path, 5041).size == (71, 71)
    assert read_rgb(path, 5000).size == (36, 36)
    noise(3000, 1).save(path)  # Pillow scales both sides or none
    with pytest.raises(UnreadableImage, match="1 x 3000 pixels, above max-image-pixels = 1000"):
        read_rgb(path, 1000)


@pytest.mark.parametrize("turned", [False, True])
def test_a_tiff_whose_lowest_number_is_white_is_no_negative(tmp_path: Path, turned: bool) -> None:
    """In 8 bits Pillow looks at that tag itself, in 16 it does not."""
    values = np.linspace(0, 60_000, 96).reshape(8, 12)
    tags = {ExifTags.Base.PhotometricInterpretation: 0} | ({ExifTags.Base.Orientation: 6} if turned else {})
    Image.fromarray(values.astype(np.uint16)).save(tmp_path / "a.tiff", tiffinfo=tags)
    grey = 255 - np.round(values / 60_000 * 255)
    shown = np.rot90(grey, -1) if turned else grey
    with open(tmp_path / "a.tiff", "rb") as file:
        pictures = read_rgb(str(tmp_path / "a.tiff")), _rgb(Image.open(file), 100)
    for image in pictures:
        assert (np.asarray(image) == shown[..., None]).all()


def test_numbers_of_32_bits_without_a_sign(tmp_path: Path) -> None:
    path, values = tmp_path / "a.tiff", np.array([[0, 2**30, 2**31, 2**32 - 1]], np.uint32)
    Image.fromarray(values.view(np.int32)).save(path)
    assert np.asarray(read_rgb(str(path)))[0, :, 0].tolist() == [170, 255, 0, 170]  # it says that they have one
    content, signed = path.read_bytes(), struct.pack("<HHIH", ExifTags.Base.SampleFormat, 3, 1, 2)
    assert content.count(signed) == 1
    path.write_bytes(content.replace(signed, signed[:-2] + struct.pack("<H", 1)))
    assert np.asarray(read_rgb(str(path)))[0, :, 0].tolist() == [0, 64, 128, 255]


def test_threads_together_decode_no_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides, held, most, lock, convert = [10, 20, 30] * 8, [0], [0], threading.Lock(), task.data.images.to_rgb
    for number, side in enumerate(sides):
        noise(side, side).save(tmp_path / f"{number}.png")

    def count(image: Image.Image) -> Image.Image:
        with lock:
            held[0] += image.width * image.height
            most[0] = max(most[0], held[0])
        threading.Event().wait(0.01)
        with lock:
            held[0] -= image.width * image.height
        return convert(image)

    monkeypatch.setattr(task.data.images, "to_rgb", count)
    with ThreadPoolExecutor(8) as pool:
        widths = list(pool.map(lambda n: read_rgb(str(tmp_path / f"{n}.png"), 1000).width, range(len(sides))))
    assert widths == sides
    assert 900 <= most[0] <= 1000


@pytest.mark.parametrize("kind", ["webp", "avif", "png", "jp2", "tiff", "jpg", "gif", "bmp", "ppm"])
def test_a_file_that_pillow_reads_at_once_has_few_bytes_for_the_largest_image(kind: str, tmp_path: Path) -> None:
    """A hundred bytes and zeros behind them could else fill the memory; a TIFF may have pages behind the first."""
    if kind == "avif" and "AVIF" not in readable_formats():
        pytest.skip("this Pillow reads no AVIF")
    path = tmp_path / f"a.{kind}"
    noise(8, 8).save(path)
    os.truncate(path, 10 * 100 + 2**20)
    assert read_rgb(str(path), 100).size == (8, 8)
    os.truncate(path, 10 * 100 + 2**20 + 1)
    if kind in ("tiff", "jpg", "gif", "bmp", "ppm"):
        assert read_rgb(str(path), 100).size == (8, 8)
    else:
        with pytest.raises(
            UnreadableImage, match="1049577 bytes, above the 1049576 that go with max-image-pixels = 100"
        ):
            read_rgb(str(path), 100)


def test_an_image_that_is_not_packed_at_all_is_no_large_file(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((1000, 1000, 4), np.uint8)).save(tmp_path / "a.png", compress_level=0)
    assert (tmp_path / "a.png").stat().st_size > 4 * 10**6
    assert read_rgb(str(tmp_path / "a.png"), 10**6).size == (1000, 1000)


FORMATS: dict[str, tuple[str, dict]] = {
    "rgb.png": ("RGB", {}),
    "alpha.png": ("RGBA", {}),
    "deep.png": ("I;16", {}),
    "float.tiff": ("F", {}),
    "progressive.jpg": ("RGB", {"progressive": True, "subsampling": 0}),
    "lossless.webp": ("RGB", {"lossless": True, "method": 0}),
    "wavelets.jp2": ("RGB", {}),
}


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by Linux's /proc")
@pytest.mark.parametrize("name", FORMATS)
def test_decoding_takes_at_most_20_bytes_for_each_pixel(name: str, tmp_path: Path) -> None:
    (mode, options), side, path = FORMATS[name], 2000, tmp_path / name
    grey = np.asarray(noise(side, side).convert("L"))
    kinds = {"I;16": np.uint16, "F": np.float32}
    image = Image.fromarray(grey.astype(kinds[mode])) if mode in kinds else noise(side, side).convert(mode)
    image.save(path, **options)
    code = (
        "import re; from PIL import Image; from task.data.images import read_rgb\n"
        "def peak(): return 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        f"Image.init(); before = peak(); read_rgb({str(path)!r}); print(peak() - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 1 <= float(grown) / side**2 <= 20


def test_a_nodes_limit_goes_before_the_runs(tmp_path: Path) -> None:
    paint(tmp_path / "data" / "cat", 3)
    hello, node = hello_message(OWN | {"max-image-pixels": 64}), {"name": "north", "data-dir": str(tmp_path / "data")}
    node |= {"state-dir": str(tmp_path / "state")}
    assert handle("hello", hello, Node(node)).config["unreadable"] == 0
    (tmp_path / "state").rename(tmp_path / "before")
    refused = str(handle("hello", hello, Node(node | {"max-image-pixels": 63})).config["error"])
    assert refused.startswith("north: 3 of 3 image files")
    assert len(scan_images(str(tmp_path / "data"), tmp_path / "other", 1.0, max_pixels=63).unreadable) == 3


SHOWN = {  # EXIF 2.3: which sides of what is shown row 0 and column 0 of what is stored are
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a.T[::-1, ::-1],
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", SHOWN)
def test_every_exif_orientation_is_turned_upright(orientation: int, tmp_path) -> None:
    stored, exif = np.arange(0, 240, 40, np.uint8).reshape(2, 3), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    shown = np.asarray(read_rgb(str(tmp_path / "a.png")))[..., 0]
    assert shown.tolist() == SHOWN[orientation](stored).tolist()


def test_deep_grey_that_begins_above_black_spans_all_shades(tmp_path) -> None:
    """A scanner's 1,000 to 3,000 of 65,535: (v - 1,000) / 2,000 of 255, so 0, 127.5 (even: 128) and 255."""
    Image.fromarray(np.array([[1000, 2000, 3000]], np.uint16)).save(tmp_path / "a.png")
    assert np.asarray(read_rgb(str(tmp_path / "a.png")))[0, :, 0].tolist() == [0, 128, 255]
