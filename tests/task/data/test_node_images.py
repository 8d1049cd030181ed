"""What a node lists of its own images, what it remembers of that, and the classes that nodes agree on."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from client_app.client import handle
from client_app.node import Node
from server_app.clients.client_info import read_hello
from server_app.clients.registry import log_clients
from server_app.transport.base import Reply
from task.config.parsing import parse
from task.data.class_names import choose_spellings
from task.data.images import ImageFiles, Images, Subset, UnreadableImage, decode
from task.data.load import load_dataset
from task.data.node_images import load_inventory, open_inventory, scan_images, unreadable_classes
from task.data.splits import select_by_digest
from task.keys import ConfigError
from task.scenario.class_stream import class_order
from task.scenario.scenario import build_scenario
from task.scenario.task_plan import TaskPlan, first_task_plan
from tests.helpers.own_data import OWN, paint
from tests.helpers.runs import hello_message


@pytest.fixture
def data(tmp_path: Path) -> Path:
    paint(tmp_path / "data" / "cat", 40)
    paint(tmp_path / "data" / "dog", 20)
    return tmp_path / "data"


def paths(images: Images) -> set[str]:
    assert isinstance(images, Subset)
    assert isinstance(images.source, ImageFiles)
    return {images.source.paths[i] for i in images.positions}


def test_a_class_folder_is_split_and_each_class_is_trained_on(data: Path, tmp_path: Path) -> None:
    # one whose only file would be held out by its digest
    lone = next(f"owl{i}" for i in range(99) if select_by_digest([f"owl{i}/000.png".encode()])[0])
    paint(data / lone, 1)
    dataset = open_inventory(scan_images(str(data), tmp_path / "state", 0.0), 8)
    assert dataset.class_names == ("cat", "dog", lone)
    train, test = np.bincount(dataset.train_labels), np.bincount(dataset.test_labels, minlength=3)
    assert (train + test).tolist() == [40, 20, 1]
    assert train[2] == 1
    assert 2 <= test[0] <= 16  # a fifth of 40 by digest: 8, four standard deviations either way would be 10
    trained = {Path(p).name for p in paths(dataset.train_images) if lone in p}
    paint(data / lone, 9, first=1)
    later = open_inventory(scan_images(str(data), tmp_path / "state", 0.0), 8)
    assert trained <= {Path(p).name for p in paths(later.train_images) if lone in p}


def test_groups_of_a_nodes_arrays_are_held_out_together(tmp_path: Path) -> None:
    """By the digest of the group's text, so that the file may grow."""
    images = np.random.default_rng(0).integers(0, 256, (80, 8, 8, 3), np.uint8)
    groups = 7 * (np.arange(80) % 40 // 2)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(80) // 40, groups=groups)
    dataset = open_inventory(scan_images(str(tmp_path / "a.npz"), tmp_path / "state", 0.0), 8)
    marked = select_by_digest(str(n).encode() for n in groups)
    assert isinstance(dataset.test_images, Subset)
    assert dataset.test_images.positions.tolist() == np.flatnonzero(marked).tolist()


def test_what_is_trained_on_is_never_held_out_later(data: Path, tmp_path: Path) -> None:
    before = open_inventory(scan_images(str(data), tmp_path / "state", 0.0), 8)
    paint(data / "cat", 60, first=40)
    after = open_inventory(scan_images(str(data), tmp_path / "state", 0.0), 8)
    assert paths(before.train_images) <= paths(after.train_images)
    assert paths(before.test_images) <= paths(after.test_images)
    assert len(after.test_labels) > len(before.test_labels)


def test_train_and_test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            paint(tmp_path / "data" / part / name, count)
    dataset = open_inventory(scan_images(str(tmp_path / "data"), tmp_path / "state", 0.0), 8)
    assert dataset.class_names == ("cat", "dog")
    assert np.bincount(dataset.train_labels).tolist() == [3, 3]
    assert np.bincount(dataset.test_labels).tolist() == [2, 2]


def test_arrays_in_one_file(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(0).integers(0, 256, (20, 9, 7, 3), np.uint8), np.repeat([0, 1], 10)
    np.savez(tmp_path / "data.npz", images=images, labels=labels, class_names=["left", "right"])
    dataset = open_inventory(scan_images(str(tmp_path / "data.npz"), tmp_path / "state", 0.0), 8)
    assert dataset.class_names == ("left", "right")
    assert dataset.image_shape == (9, 7)


def test_an_npz_that_grows_never_holds_out_what_was_trained_on(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 6, 6, 3), np.uint8)
    parts = []
    for number in (50, 60):
        np.savez(tmp_path / f"{number}.npz", images=images[:number], labels=np.arange(number) % 2)
        dataset = open_inventory(scan_images(str(tmp_path / f"{number}.npz"), tmp_path / "state", 0.0), 8)
        parts.append(
            [{i.tobytes() for i in part[np.arange(len(part))]} for part in (dataset.train_images, dataset.test_images)]
        )
    assert parts[0][0] <= parts[1][0]
    assert parts[0][1] <= parts[1][1]
    assert len(parts[0][1]) >= 2


def test_an_npz_that_has_changed_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    for classes in (2, 4):
        np.savez(path, images=np.zeros((12, 6, 6, 3), np.uint8), labels=np.arange(12) % classes)
        scanned = scan_images(str(path), tmp_path / "state", 0.0)
        assert scanned == load_inventory(str(path), tmp_path / "state")
        assert len(open_inventory(scanned, 8).class_names) == classes


def test_the_list_is_kept_until_stock_is_taken_again(data: Path, tmp_path: Path) -> None:
    first = scan_images(str(data), tmp_path / "state", 0.0)
    paint(data / "cat", 5, first=40)
    assert load_inventory(str(data), tmp_path / "state") == first
    assert load_inventory(str(tmp_path), tmp_path / "state") is None
    assert len(scan_images(str(data), tmp_path / "state", 0.0).readable) == 65
    (kept,) = (tmp_path / "state").iterdir()
    kept.write_text('{"data-dir": ')
    assert load_inventory(str(data), tmp_path / "state") is None


def test_each_run_has_its_own_list(data: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = scan_images(str(data), state, 0.0, "first")
    paint(data / "cat", 5, first=40)
    second = scan_images(str(data), state, 0.0, "second")
    assert (len(first.readable), len(second.readable)) == (60, 65)
    assert load_inventory(str(data), state, "first") == first
    assert load_inventory(str(data), state, "second") == second
    assert load_inventory(str(data), state, "third") is None
    os.utime(next(state.glob("*-first.json")), (0, 0))  # lists of long ago are dropped
    scan_images(str(data), state, 0.0, "third")
    assert load_inventory(str(data), state, "first") is None
    assert load_inventory(str(data), state, "second") == second


def test_what_was_trained_on_is_what_the_latest_run_says(tmp_path: Path) -> None:
    """The lone file of a class, which its name marks to be held out, is trained on by the first run only."""
    root, state = tmp_path / "data", tmp_path / "state"
    name = next(f"{i:03d}" for i in range(40) if select_by_digest([f"cat/{i:03d}.png".encode()])[0])
    paint(root / "dog", 5)
    scan_images(str(root), state, 0.0, "first")
    paint(root / "cat", 1, first=int(name))
    scan_images(str(root), state, 0.0, "second")
    for run, age in (("first", 20), ("second", 10)):
        os.utime(next(state.glob(f"*-{run}.json")), (time.time() - age, time.time() - age))
    paint(root / "cat", 20, first=40)
    assert f"cat/{name}.png" not in scan_images(str(root), state, 0.0, "third").held_out


def test_a_class_whose_disk_is_not_there_is_named(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (data / "owl").symlink_to(tmp_path / "unmounted")
    (data / "fox").mkdir()
    inventory = scan_images(str(data), tmp_path / "state", 0.05)
    assert inventory.unreadable == ("owl/",)
    assert unreadable_classes(inventory) == ["owl"]
    assert "No such file or directory" in caplog.text
    assert f"the class folder {data / 'fox'} holds no image" in caplog.text


def test_nodes_may_share_a_folder_for_what_they_remember(data: Path, tmp_path: Path) -> None:
    paint(tmp_path / "other" / "owl", 3)
    inventories = [scan_images(str(place), tmp_path / "state", 0.0, "run") for place in (data, tmp_path / "other")]
    assert [load_inventory(f.data_dir, tmp_path / "state", "run") for f in inventories] == inventories


def test_a_machine_without_memory_is_not_a_damaged_file(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, formats: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", full)
    with pytest.raises(MemoryError):
        decode(str(data / "cat" / "000.png"), 8)


@pytest.mark.parametrize("lost", ["train", "test", "all"])
def test_a_lost_disk_is_said(lost: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for part in ("train", "test"):
        paint(root / part / "cat", 10)
    first = scan_images(str(root), tmp_path / "state", 0.05)
    assert first.split
    shutil.rmtree(root if lost == "all" else root / lost)
    root.mkdir(exist_ok=True)
    kept = load_inventory(str(root), tmp_path / "state")
    assert kept == first
    assert open_inventory(kept, 8).class_names == ("cat",)
    with pytest.raises(ConfigError, match=r"of 20 image files .* cannot be read"):
        scan_images(str(root), tmp_path / "state", 0.05, previous=kept)


@pytest.mark.parametrize(("mode", "kind"), [("I;16", np.uint16), ("I", np.int32), ("F", np.float32)])
def test_deep_grey_is_stretched_and_not_cut_off(mode: str, kind: type, tmp_path: Path) -> None:
    """12 bits in 16, as scanners write them."""
    Image.fromarray(np.array([[0, 4095], [1000, 2000]], kind)).save(tmp_path / "scan.tiff")
    with Image.open(tmp_path / "scan.tiff") as image:
        assert image.mode == mode
    assert decode(str(tmp_path / "scan.tiff"), 2)[..., 0].tolist() == [[0, 255], [62, 125]]
    Image.fromarray(np.full((2, 2), 7, kind)).save(tmp_path / "flat.tiff")
    assert (decode(str(tmp_path / "flat.tiff"), 2) == 0).all()
    if kind is np.float32:
        Image.fromarray(np.full((2, 2), np.nan, kind)).save(tmp_path / "nan.tiff")
        with pytest.raises(UnreadableImage, match="NaN"):
            decode(str(tmp_path / "nan.tiff"), 2)


def test_what_a_reader_raises_is_an_unreadable_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path, 1)

    def broken(path: str, formats: object) -> None:
        raise RuntimeError("Failed to decode frame 0")

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(UnreadableImage, match=r"000.png.*Failed to decode"):
        decode(str(tmp_path / "000.png"), 8)


def test_npz_names_are_texts_and_may_have_no_image(tmp_path: Path) -> None:
    path, images = tmp_path / "data.npz", np.zeros((4, 8, 8, 3), np.uint8)
    names = np.array([b"owl", "Bu\u0308gel".encode(), b"cat"])
    np.savez(path, images=images, labels=np.full(4, 2), class_names=names, split=np.array([0.0, 0.0, 0.0, 1.0]))
    dataset = open_inventory(scan_images(str(path), tmp_path / "state", 0.0), 8)
    assert dataset.class_names == ("owl", "B\u00fcgel", "cat")
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (3, 1)
    many = np.array([f"class {i}" for i in range(10)])
    np.savez(path, images=images, labels=np.full(4, 9), class_names=many)  # more names than images
    assert open_inventory(scan_images(str(path), tmp_path / "many", 0.0), 7).class_names == tuple(many)
    np.savez(path, images=images, labels=np.zeros(4, int), class_names=np.array(["B\u00fcgel".encode("latin-1")]))
    with pytest.raises(ConfigError, match=r"not a readable \.npz"):
        open_inventory(scan_images(str(path), tmp_path / "other", 0.0), 3)
    np.savez(path, images=images, labels=np.zeros(4, int), split=np.array(["train", "train", "train", "test"]))
    with pytest.raises(ConfigError, match="split must be a number for each of the 4 labels"):
        open_inventory(scan_images(str(path), tmp_path / "other", 0.0), 4)


@pytest.mark.parametrize("parts", [("train", "val"), ("Train", "Test"), ("train",)])
def test_parts_are_no_classes(parts: tuple[str, ...], tmp_path: Path) -> None:
    for part in parts:
        paint(tmp_path / "data" / part / "cat", 2)
    with pytest.raises(ConfigError, match="looks like a part of the data"):
        scan_images(str(tmp_path / "data"), tmp_path / "state", 0.0)


def test_trains_are_a_class(tmp_path: Path) -> None:
    for name in ("train", "bus"):
        paint(tmp_path / "data" / name, 2)
    paint(tmp_path / "data" / "train" / "more", 2)
    assert len(scan_images(str(tmp_path / "data"), tmp_path / "state", 0.0).readable) == 6


def test_links_to_folders_are_not_followed(data: Path, tmp_path: Path) -> None:
    (data / "cat" / "up").symlink_to(data)
    assert len(scan_images(str(data), tmp_path / "state", 0.0).readable) == 60


def test_only_what_people_put_there_is_an_image(data: Path, tmp_path: Path) -> None:
    for copies in (".ipynb_checkpoints", "@eaDir", "__MACOSX", "deep/.thumbs"):
        paint(data / "cat" / copies, 1)
    for name in ("report.pdf", "table.h5", "film.mpg"):
        (data / "cat" / name).write_bytes(b"no image")
    assert len(scan_images(str(data), tmp_path / "state", 0.0).readable) == 60


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of a user who has no more rights than others: root, who may read everything, gives his up."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(os.getuid())


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="rights as on Unix")
def test_a_state_dir_of_another_user_is_refused(unprivileged: Path) -> None:
    """Not overlooked: what its list says was trained on must not be held out."""
    root, state = unprivileged / "data", unprivileged / "state" / "north"
    paint(root / "cat", 10)
    scan_images(str(root), state, 0.0)
    (kept,) = state.iterdir()
    for path, rights in ((kept, 0), (state, 0), (state, 0o300), (state.parent, 0)):
        path.chmod(rights)
        with pytest.raises(ConfigError, match=f"state-dir = '{state}' of this node cannot be read or written: .*Perm"):
            scan_images(str(root), state, 0.0)
        path.chmod(0o700)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="rights as on Unix")
def test_a_node_without_images_of_its_own_says_hello_without_the_right_to_its_state_dir(unprivileged: Path) -> None:
    (unprivileged / "closed").mkdir(0)
    node = Node({"partition-id": 0, "state-dir": str(unprivileged / "closed" / "state")})
    assert int(str(handle("hello", hello_message({"num-clients": 2}), node).config["free-disk"])) > 0


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="rights as on Unix")
def test_a_folder_without_the_right_to_read_it_is_named(unprivileged: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, state = unprivileged / "data", unprivileged / "state"
    for name in ("cat", "cow", "dog/left", "dog/right"):
        paint(root / name, 10)
    for name in ("cow", "dog/left"):
        (root / name).chmod(0)
    inventory = scan_images(str(root), state, 0.1)
    assert inventory.unreadable == ("cow/", "dog/left/")
    assert len(inventory.readable) == 20
    assert [str(root / name) in caplog.text for name in ("cow", "dog/left", "dog/right")] == [True, True, False]
    with pytest.raises(ConfigError, match="2 of 22 image files"):
        scan_images(str(root), state, 0.05)
    values = OWN | {"unreadable-share": 0.1}
    node = Node({"name": "north", "data-dir": str(root), "state-dir": str(state)})
    client = read_hello(Reply(7, handle("hello", hello_message(values), node), "", 0, 0), None)
    assert (client.classes, client.unreadable_classes, client.unreadable) == (("cat", "dog"), ("cow", "dog"), 2)
    log_clients([client])
    assert "north cannot read a folder of class cow, dog: its log says which" in caplog.text
    assert scan_images(str(root), state, 0.1, previous=inventory).unreadable == inventory.unreadable
    with pytest.raises(ConfigError, match=f"data-dir = '{root}' cannot be read: .*cow"):
        load_dataset("folder", str(root), 16, 0.0, 0)
    for folder, words in ((root, "cannot be read by this node: .*Permission"), (root.parent, ".* may not read it")):
        folder.chmod(0)
        with pytest.raises(ConfigError, match=f"data-dir = '{root}':? {words}"):
            scan_images(str(root), state, 1.0)
        folder.chmod(0o700)
    (root / "test").mkdir()
    (root / "train").mkdir(0)
    with pytest.raises(ConfigError, match=f"data-dir = '{root}' cannot be read by this node: .*train"):
        scan_images(str(root), state, 1.0)


def test_losses_add_up(data: Path, tmp_path: Path) -> None:
    """A tenth may be lost in all, and not of what is left each time."""
    inventory = scan_images(str(data), tmp_path / "state", 0.1)
    for i in range(6):
        (data / "cat" / f"{i:03d}.png").unlink()
        inventory = scan_images(str(data), tmp_path / "state", 0.1, previous=inventory)
    assert len(inventory.unreadable) == 6
    (data / "cat" / "006.png").unlink()
    with pytest.raises(ConfigError, match="7 of 60 image files"):
        scan_images(str(data), tmp_path / "state", 0.1, previous=inventory)


@pytest.mark.parametrize("between", ["gone", "unreadable", "unmounted"])
def test_what_was_trained_on_is_never_held_out(between: str, tmp_path: Path) -> None:
    """The one file of a class is trained on though its name says otherwise, and so it stays when more come."""
    root, state = tmp_path / "data", tmp_path / "state"
    marked = [f"cat/{i:03d}.png" for i in range(40) if select_by_digest([f"cat/{i:03d}.png".encode()])[0]]
    paint(root / "cat", 1, first=int(marked[0][4:7]))
    paint(root / "dog", 5)
    assert marked[0] not in scan_images(str(root), state, 0.5, "first").held_out
    content = (root / marked[0]).read_bytes()
    if between == "unmounted":
        root.rename(tmp_path / "away")
        root.mkdir()
        scan_images(str(root), state, 0.5, "second")
        root.rmdir()
        (tmp_path / "away").rename(root)
    else:
        (root / marked[0]).unlink() if between == "gone" else (root / marked[0]).write_bytes(b"")
        scan_images(str(root), state, 0.5, "second")
    (root / marked[0]).write_bytes(content)
    paint(root / "cat", 40, first=40)
    inventory = scan_images(str(root), state, 0.5, "third")
    assert marked[0] in inventory.readable
    assert marked[0] not in inventory.held_out
    assert any(name.startswith("cat/") for name in inventory.held_out)


def test_what_is_lost_is_left_out_and_nothing_new_enters(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    first = scan_images(str(data), state, 0.0)
    paint(data / "cat", 5, first=40)
    (data / "dog" / "001.png").unlink()
    after = scan_images(str(data), state, 0.1, previous=first)
    assert set(after.readable) == set(first.readable) - {"dog/001.png"}
    assert set(after.held_out) == set(first.held_out) - {"dog/001.png"}
    sick = str(data / "dog" / "002.png")  # a disk error leaves size and time as they were

    def read(path: str, max_pixels: int) -> None:
        if path == sick:
            raise UnreadableImage("sick")

    monkeypatch.setattr("task.data.node_images.read_rgb", read)
    assert set(after.readable) - set(scan_images(str(data), state, 0.1, previous=after).readable) == {"dog/002.png"}


def test_unreadable_files_are_named_and_skipped_up_to_a_share(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (data / "cat" / "000.png").write_bytes(b"no image")
    (data / "dog" / "gone.png").symlink_to(data / "nowhere.png")
    inventory = scan_images(str(data), tmp_path / "state", 0.1)
    assert inventory.unreadable == ("cat/000.png", "dog/gone.png")
    assert len(inventory.readable) == 59
    assert "000.png" in caplog.text
    with pytest.raises(ConfigError, match=r"2 of 61 image files .*unreadable-share"):
        scan_images(str(data), tmp_path / "state", 0.01)
    paint(data / "cat", 1)  # mended: read again since it has changed
    assert scan_images(str(data), tmp_path / "state", 0.1).unreadable == ("dog/gone.png",)


def test_only_new_and_changed_files_are_read(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan_images(str(data), tmp_path / "state", 0.0)
    read: list[str] = []
    monkeypatch.setattr("task.data.node_images.read_rgb", lambda path, _: read.append(Path(path).name))
    paint(data / "dog", 1, first=99)
    scan_images(str(data), tmp_path / "state", 0.0)
    assert read == ["099.png"]


def test_class_names_travel_and_are_written_in_one_way(tmp_path: Path) -> None:
    paint(tmp_path / "data" / "Bu\u0308gel", 2)  # as some systems store an umlaut: u and two dots
    assert open_inventory(scan_images(str(tmp_path / "data"), tmp_path / "state", 0.0), 8).class_names == (
        "B\u00fcgel",
    )
    paint(tmp_path / "data" / "li\ne", 2)
    with pytest.raises(ConfigError, match=r"rename the class 'li\\ne'"):
        open_inventory(scan_images(str(tmp_path / "data"), tmp_path / "state", 0.0), 8)


def test_no_such_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        scan_images(str(tmp_path / "nowhere"), tmp_path / "state", 0.0)
    (tmp_path / "data" / "cat").mkdir(parents=True)
    assert open_inventory(scan_images(str(tmp_path / "data"), tmp_path / "state", 0.0), 8).class_names == ()


def test_a_nodes_own_ids_become_those_of_the_plan(data: Path, tmp_path: Path) -> None:
    plan = TaskPlan(("ant", "cat", "bee"), ((1,), (2, 0)), (8, 8))
    config = parse({"dataset": "own", "evaluate": "clients", "image-size": 16, "rounds-per-task": 1})
    scenario = build_scenario(config, plan, scan_images(str(data), tmp_path / "state", 0.0))
    assert set(scenario.dataset.train_labels.tolist()) == {1, -1}  # dogs are in no task
    assert scenario.schedule.head_rows.tolist() == [2, 0, 1]
    empty = build_scenario(config, plan).dataset
    assert (len(empty.train_labels), empty.image_shape) == (0, (8, 8))


def test_plans_by_name_shuffled_and_as_classes_appear() -> None:
    def plan(order: str, tasks: int) -> TaskPlan:
        values = {"dataset": "own", "evaluate": "clients", "class-order": order, "num-tasks": tasks}
        return first_task_plan(parse(values), ["dog", "cat", "owl", "cat"], (8, 8))

    assert plan("given", 2).tasks == ((0, 1), (2,))
    assert plan("given", 2).class_names == ("cat", "dog", "owl")
    assert plan("shuffled", 3).tasks == tuple((c,) for c in class_order(3, 0, "shuffled"))
    open_ended = plan("appearing", 5)
    assert open_ended.tasks == ((0, 1, 2),)
    grown = open_ended.add_task(["emu", "cat", "ant"])
    assert (grown.class_names[3:], grown.tasks) == (("ant", "emu"), ((0, 1, 2), (3, 4)))
    assert open_ended.add_task(["Cat", "OWL!", "Emu", "emu", "emu"]).class_names[3:] == ("emu",)
    assert TaskPlan.read(json.loads(json.dumps(grown.message()))) == grown
    with pytest.raises(ConfigError, match=r"num-tasks=4.*cat, dog, owl"):
        plan("given", 4)


@pytest.mark.parametrize("twin", ["Cat", "cat ", " cat", "c at"])
def test_two_folders_of_one_class_are_an_error_that_names_both(twin: str, data: Path, tmp_path: Path) -> None:
    paint(data / twin, 3)
    names = " and ".join(f"'{name}'" for name in sorted([twin, "cat"]))
    with pytest.raises(ConfigError, match=rf"{names} differ only in case, punctuation or white space"):
        open_inventory(scan_images(str(data), tmp_path / "state", 0.0), 8)


def test_blanks_around_a_class_name_are_no_part_of_the_runs_name() -> None:
    assert choose_spellings([" big  owl ", "Cow", "cow"]) == {"bigowl": "big owl", "cow": "Cow"}


def test_a_node_that_cannot_take_part_says_who_it_is(tmp_path: Path) -> None:
    node = Node({"name": "north", "data-dir": str(tmp_path / "away"), "state-dir": str(tmp_path / "state")})
    error = str(handle("hello", hello_message(OWN), node).config["error"])
    assert error.startswith("north: data-dir = ")
    assert str(tmp_path / "away") in error
