"""Run keys: every bad value ends with one message that names the key, the value and what is allowed."""

import re
import tomllib
from pathlib import Path

import pytest

from task.config.parsing import ignored_keys, parse, parse_text
from task.config.schema import defaults, known_keys
from task.keys import AUTO, ConfigError

ROOT = Path(__file__).parents[3]


def test_pyproject_lists_every_key_with_its_default() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    assert listed == defaults()
    assert {k: type(v) for k, v in listed.items()} == {k: type(v) for k, v in defaults().items()}
    for name, known in known_keys().items():
        assert re.search(rf"^{name} = .*  # {re.escape(known.rule.help)}$", text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"metod": "hgp"}, ["'metod'", "'method'"]),
        ({"method": "hpg"}, ["'hpg'", "'hgp'", "fedavg"]),
        ({"dirichlet-beta": -1}, ["dirichlet-beta", "-1", "above 0"]),
        ({"dirichlet-beta": 0.0}, ["dirichlet-beta", "0.0", "above 0"]),
        ({"dirichlet-beta": float("nan")}, ["dirichlet-beta", "nan"]),
        ({"learning-rate": float("inf")}, ["learning-rate", "inf"]),
        ({"num-tasks": "five"}, ["num-tasks", "'five'", "whole number"]),
        ({"num-tasks": 2.0}, ["num-tasks", "2.0", "whole number"]),
        ({"num-tasks": True}, ["num-tasks", "True"]),
        ({"prompt-length": 0}, ["prompt-length", "0", "at least 1"]),
        ({"rounds-per-task": 0}, ["rounds-per-task", "0", "at least 1"]),
        ({"prompt-blocks": "0-3"}, ["prompt-blocks", "'0-3'"]),
        ({"prompt-blocks": "one"}, ["prompt-blocks", "'one'"]),
        ({"partition": "dirichle"}, ["partition", "'dirichle'", "dirichlet"]),
        ({"method": "ncm", "prompt": "shared"}, ["prompt", "'shared'", "'ncm'"]),
        ({"method": "fedavg", "hgp-scale": 2.0}, ["hgp-scale", "2.0", "'hgp'"]),
        ({"partition": "iid", "dirichlet-beta": 0.1}, ["dirichlet-beta", "0.1", "'dirichlet'"]),
        ({"method": "pip", "statistics-rounds": "last"}, ["statistics-rounds", "'last'", "'pip'", "hgp", "every"]),
        ({"method": "fedavg", "statistics-rounds": "last"}, ["statistics-rounds", "'fedavg'"]),
        ({"method": "hgp", "partition": "consensus"}, ["partition", "'consensus'", "method", "'hgp'", "fedprok"]),
        ({"consensus-rate": 0.2}, ["consensus-rate", "0.2", "'consensus'"]),
        ({"method": "fedavg", "partition": "consensus", "consensus-rate": 1.5}, ["consensus-rate", "1.5", "at most 1"]),
        ({"partition": "split-ratio", "split-ratio": 0.0}, ["split-ratio", "0.0", "above 0"]),
        ({"quorum": 5, "num-clients": 2}, ["quorum", "5", "2"]),
        ({"method": "fedprok", "prompt": "none", "fedprok-features": "every-task"}, ["fedprok-features", "ignored"]),
        ({"method": "fedprok", "prompt": "none", "fedprok-prototypes": "after"}, ["fedprok-prototypes", "ignored"]),
        ({"clients-per-round": 5, "num-clients": 2}, ["clients-per-round", "5", "2"]),
        ({"dataset": "npz"}, ["data-dir", "'npz'"]),
        ({"seed": -1}, ["seed", "-1", "at least 0"]),
        ({"device": 3}, ["device", "3", "text"]),
        ({"run-name": "night\x00"}, ["run-name", "'night\\x00'", "one line"]),
        ({"data-dir": "/data\n"}, ["data-dir", "'/data\\n'", "one line"]),
        ({"output-dir": "/\udcff"}, ["output-dir", "'/\\udcff'", "one line"]),
        ({"prompt-pool": 5}, ["prompt-pool", "5", "'l2p' or 'coda' or 'decomposed'"]),
        ({"prompt-matching": 0.2, "prompt": "coda", "method": "fedavg"}, ["prompt-matching", "0.2", "'dualprompt'"]),
        ({"prompt-length": 3, "method": "ncm"}, ["prompt-length", "3", "'shared'"]),
        ({"hgp-rank": 4}, ["hgp-rank", "4", "hgp-covariance = 'low-rank'"]),
        ({"data-dir": "/somewhere"}, ["data-dir", "/somewhere", "'npz'"]),
        ({"backbone-learning-rate": 0.5}, ["backbone-learning-rate", "0.5", "frozen"]),
        ({"prompt-projected": True, "prompt": "l2p", "method": "fedavg"}, ["prompt-projected", "'dualprompt'"]),
        ({"prompt-projected": True, "prompt": "fused", "method": "fedavg"}, ["prompt-projected", "'dualprompt'"]),
        ({"method": "afcl", "afcl-adaptation-rounds": 3}, ["afcl-adaptation-rounds = 3", "ignored", "prompt"]),
        ({"method": "afcl", "afcl-early-feature": "patches"}, ["afcl-early-feature", "ignored", "afcl-depth"]),
        (
            {"method": "afcl", "afcl-early-feature": "patches", "prompt": "lora", "afcl-frozen-depth": 1.0},
            ["afcl-early-feature", "ignored", "afcl-frozen-depth between 0 and 1"],
        ),
        (
            {"method": "fedrda", "prompt": "none", "fedrda-adaptation-rounds": 3},
            ["fedrda-adaptation-rounds", "ignored"],
        ),
        ({"method": "fedrda", "federated-bias": True}, ["federated-bias", "'fedrda'"]),
        ({"method": "afcl", "afcl-shrinkage": 0.1}, ["afcl-shrinkage", "afcl-head = 'discriminant' or 'regularised'"]),
        ({"method": "afcl", "max-update-norm": 1.0}, ["max-update-norm", "ignored", "'afcl'"]),
        ({"method": "afcl", "privacy-clip": 1.0}, ["privacy-clip", "ignored", "'afcl'"]),
        ({"hepco-lambda-mse": 2.0, "method": "hepco"}, ["hepco-lambda-mse", "2.0", "hepco-query-gradient = True"]),
    ],
)
def test_bad_values_are_named(values: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert all(word in str(caught.value) for word in words), caught.value


def test_keys_of_local_training_that_nothing_reads_are_named() -> None:
    """They are not refused: a suite gives all its methods the same ones."""
    assert ignored_keys(parse({"method": "ncm", "local-epochs": 3, "learning-rate": 0.5})) == [
        "local-epochs",
        "learning-rate",
    ]
    assert ignored_keys(parse({"method": "ncm", "seed": 3})) == []
    assert ignored_keys(parse({"method": "fedavg", "local-epochs": 3})) == []


def test_every_number_key_refuses_text_and_every_text_key_numbers() -> None:
    for name, k in known_keys().items():
        wrong = 7 if k.kind is str else "seven"
        with pytest.raises(ConfigError, match=name):
            parse({name: wrong})


def test_unquoted_text_is_typed_by_its_key() -> None:
    typed = parse_text({"run-name": "123", "seed": "4", "learning-rate": "auto", "dirichlet-beta": "1"})
    assert typed == {"run-name": "123", "seed": 4, "learning-rate": AUTO, "dirichlet-beta": 1.0}
    assert type(typed["dirichlet-beta"]) is float
    with pytest.raises(ConfigError, match="seed"):
        parse_text({"seed": "4.5"})
    with pytest.raises(ConfigError, match="'method'"):
        parse_text({"methd": "hgp"})


def test_auto_takes_the_methods_own_value() -> None:
    assert parse({"method": "head-only"}).learning_rate == 0.01
    assert parse({"method": "hgp"}).learning_rate == 0.001
    assert parse({"method": "head-only", "learning-rate": 0.5}).learning_rate == 0.5
    assert parse({"method": "fedavg"}).prompt == "shared"
    assert parse({"method": "head-only"}).prompt == "none"


@pytest.mark.parametrize("method", ["hgp", "fedavg", "head-only", "ncm", "afcl", "fedrda"])
def test_resolved_keys_parse_to_the_same_object(method: str) -> None:
    config = parse({"method": method, "partition": "quantity", "classes-per-client": 1, "seed": 3})
    assert parse(config.flat()) == config
    assert config.partition_parameters == {"classes_per_client": 1}


@pytest.mark.parametrize(
    ("text", "blocks"), [("1-5", [0, 1, 2, 3, 4]), ("1,3", [0, 2]), ("2", [1]), ("1-2,6", [0, 1, 5])]
)
def test_prompt_blocks(text: str, blocks: list[int]) -> None:
    assert parse({"prompt-blocks": text}).blocks() == blocks


# What the papers say, or where they are silent what the table of methods took from HGP's setting.
PUBLISHED: dict[str, dict[str, object]] = {
    "fppl": {"prompt-length": 20, "prompt-blocks": "1-5", "batch-size": 128, "optimizer": "adam", "learning-rate": 1e-3}
    | {"local-epochs": 5, "fppl-tau": 0.2, "fppl-debias-epochs": 5}
    | {"fppl-debias-batch-size": 128, "fppl-debias-learning-rate": 1e-3, "learning-rate-schedule": "constant"},
    "ccvr": {"ccvr-covariance": "full", "ccvr-samples-per-class": 256, "ccvr-epochs": 5, "ccvr-learning-rate": 0.01}
    | {"ccvr-logit-temperature": 0.0},
    "fedslca": {"fedslca-logit-temperature": 0.1, "fedslca-covariance": "full", "fedslca-samples-per-class": 256}
    | {"optimizer": "sgd", "learning-rate": 0.01, "backbone-learning-rate": 1e-4},
    "fedavg-ft": {"backbone-learning-rate": 1e-4},
    "fedewc": {"backbone-learning-rate": 1e-4, "fedewc-strength": 1000.0},
    "fedlwf": {"backbone-learning-rate": 1e-4, "learning-rate": 0.01},
    "fedprox": {"fedprox-mu": 0.01},
    "fedprok": {"fedprok-beta": 0.5, "learning-rate": 0.01, "fedprok-fusion": "tasks", "fedprok-prototypes": "before"}
    | {"fedprok-features": "first-task", "learning-rate-schedule": "cosine"},
    "fed-cprompt": {"prompt-length": 4, "prompt-pool": 100},
    "head-only": {"learning-rate": 0.01, "prompt": "none"},
    "ncm": {"rounds-per-task": 1},
    "afcl": {"rounds-per-task": 1, "afcl-ridge": 0.0, "afcl-random-features": 0, "afcl-head": "ridge", "prompt": "none"}
    | {
        "afcl-depth": 0.0,
        "afcl-early-feature": "class-token",
        "afcl-sketch": 0,
        "afcl-dtype": "fp32",
        "afcl-adaptation-rounds": 5,
    },
    "fedrda": {"rounds-per-task": 1, "fedrda-head": "regularised", "prompt": "lora", "prompt-length": 4}
    | {
        "fedrda-depth": 0.5,
        "fedrda-early-feature": "patches",
        "fedrda-dtype": "fp16",
        "fedrda-shrinkage": 0.0,
        "fedrda-own-covariance": 0.1,
    }
    | {"fedrda-rank": 32, "fedrda-adaptation-rounds": 0},
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_defaults_of_the_other_methods(method: str) -> None:
    keys = parse({"method": method}).flat()
    assert {name: keys[name] for name in PUBLISHED[method]} == PUBLISHED[method]


@pytest.mark.parametrize(
    ("name", "beyond"),
    [
        ("hgp-samples-per-class", 10**12),
        ("ccvr-samples-per-class", 10**12),
        ("fedslca-samples-per-class", 10**12),
        ("hepco-batch-size", 10**9),
        ("hepco-replay-ratio", 1e9),
        ("hgp-logit-temperature", 10**400),
        ("hgp-batch-size", 10**20),
        ("hgp-scale", 1e300),
        ("hgp-rank", 10**9),
        ("prompt-pool", 10**9),
        ("prompt-length", 1_001),
        ("image-size", 4_097),
        ("num-clients", 10_001),
        ("afcl-random-features", 20_001),
        ("fppl-tau", 1e-9),
    ],
)
def test_sizes_beyond_any_memory_are_refused(name: str, beyond: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = .* is not possible: it must be .* at (least|most)"):
        parse({"method": name.split("-")[0], name: beyond})


def test_defaults_of_hgp_are_the_papers() -> None:
    """HGP section 3, appendix B.1: s = 3, 256 per class, 5 epochs, SGD 0.01 with momentum 0.9, batch 256, L_p = 8."""
    config = parse({})
    own = config.options
    assert (own.scale, own.samples_per_class, own.epochs, own.batch_size) == (3.0, 256, 5, 256)
    assert (own.learning_rate, own.momentum, own.class_weights, own.draw) == (0.01, 0.9, "uniform", "epoch")
    assert (config.prompt_length, config.blocks(), config.gradient_clip) == (8, [0, 1, 2, 3, 4], 1.0)
    assert (config.optimizer, config.learning_rate, config.batch_size) == ("adam", 0.001, 64)
