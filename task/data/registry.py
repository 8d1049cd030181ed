"""The table of data sets."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from task.data.builtin import digits, synthetic
from task.data.custom import folder, npz
from task.data.images import Dataset
from task.data.published import DOMAINS, cifar, cub200, domainnet, imagenet_r, mini_imagenet, tiny_imagenet


@dataclass(frozen=True)
class Source:
    """A row of the table.

    Attributes:
        load: (folder of the data, side in pixels of decoded files, most pixels of a file) -> the data set.
        classes: number of classes; 0 if it is not fixed, and then nothing is counted.
        train: number of training images; of all images if ``test`` is 0.
        test: number of test images; 0 if there is no published test set, and ``load`` draws one.
        folder: folder of the files below data-dir, as the archive unpacks.
        holds: files that must be in it.
        address: where people get the archive.
    """

    load: Callable[[Path, int, int], Dataset]
    classes: int = 0
    train: int = 0
    test: int = 0
    folder: str = ""
    holds: str = ""
    address: str = ""


# fmt: off
SOURCES = {
    "digits": Source(digits),
    "synthetic": Source(synthetic),
    "npz": Source(npz),
    "folder": Source(folder),
    # name: loader, classes, training images, test images, folder below data-dir, what is in it, address
    "cifar10": Source(partial(cifar, "CIFAR10"), 10, 50_000, 10_000, "cifar-10-batches-py",
        "data_batch_1 to data_batch_5, test_batch and batches.meta",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"),
    "cifar100": Source(partial(cifar, "CIFAR100"), 100, 50_000, 10_000, "cifar-100-python",
        "train, test and meta", "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"),
    "tiny-imagenet": Source(tiny_imagenet, 200, 100_000, 10_000, "tiny-imagenet-200",
        "train/, val/ and wnids.txt", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
    "mini-imagenet": Source(mini_imagenet, 100, 60_000, 0, "mini-imagenet",
        "train.csv, val.csv and test.csv, and in images/ every file that they name",
        "https://github.com/twitter-research/meta-learning-lstm/tree/master/data/miniImagenet (the lists; "
        "https://github.com/yaoyao-liu/mini-imagenet-tools makes the images from ImageNet, https://image-net.org)"),
    "cub200": Source(cub200, 200, 5_994, 5_794, "CUB_200_2011",
        "images/, images.txt, image_class_labels.txt, train_test_split.txt and classes.txt",
        "https://www.vision.caltech.edu/datasets/cub_200_2011"),
    "imagenet-r": Source(imagenet_r, 200, 30_000, 0, "imagenet-r",
        "a folder of images per class", "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar"),
    "domainnet": Source(domainnet, 345, 409_832, 176_743, "domainnet",
        "for each of " + ", ".join(DOMAINS) + " its folder and its lists _train.txt and _test.txt (cleaned version)",
        "http://ai.bu.edu/M3SDA"),
}
