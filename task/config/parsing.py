"""Parse run keys into one checked Config: refuse unknown keys and wrong values, and fill in "auto"."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from task.config.checks import check_combination
from task.config.schema import OF_THE_NODE, Config, changed_keys, defaults, keys_affecting, known_keys, missing_setting
from task.keys import AUTO, ConfigError, IgnoredKeyError, Key, did_you_mean, keys_of
from task.message import Scalar
from task.methods import METHODS, Method, register
from task.prompt_kinds import PROMPTS


def apply_node_settings(values: Mapping[str, Scalar], settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """A run's values on one node: for the keys that belong to the node, its own settings win, if the run reads them."""
    keys, run_values = known_keys(), {**defaults(), **values}
    read = [name for name in keys_affecting(*OF_THE_NODE) if not missing_setting(keys[name], run_values, keys)]
    return {**values, **{name: settings[name] for name in read if name in settings}}


def parse_text(pairs: Mapping[str, str]) -> dict[str, Scalar]:
    """Typed values from unquoted command-line text.

    Raises:
        ConfigError: an unknown key or a text that the key's type cannot be.
    """
    keys = _keys_for(pairs)
    return {name: keys[name].from_text(text) for name, text in pairs.items()}


def check_values(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Check each run key by itself and return its value in the key's type.

    Raises:
        ConfigError: an unknown key or a value that the key cannot have.
    """
    keys = _keys_for(values)
    return {name: keys[name].check(value) for name, value in values.items()}


def parse(values: Mapping[str, Scalar]) -> Config:
    """Check every value and every combination. Keys left at "auto" take the method's value.

    Args:
        values: run keys in kebab-case; missing ones take their defaults.

    Raises:
        ConfigError: names the key, the value given and what is allowed.
    """
    given = check_values(values)  # first: it may register a method from outside, which adds keys
    keys, all_values = known_keys(), defaults() | given
    method = METHODS.get(str(all_values["method"]))
    if method is None:
        raise ConfigError(_unknown("method", str(all_values["method"]), list(METHODS)))
    prompt = str(method.prompts[0] if all_values["prompt"] == AUTO else all_values["prompt"])
    _refuse_unread(all_values | {"prompt": prompt}, method, keys)
    prefix, own = f"{method.name}-", method.own_keys()
    resolved = {n: _resolve(k, all_values[n], method, prompt) for n, k in {**keys_of(Config), **own}.items()}
    core = {n.replace("-", "_"): resolved[n] for n in keys_of(Config)}
    options = {n.removeprefix(prefix).replace("-", "_"): resolved[n] for n in own}
    config = Config(**core, options=method.options(**options))  # type: ignore[arg-type]  # each was checked above
    step = "backbone-learning-rate"
    if not config.trains_backbone and config.backbone_learning_rate != _resolve(keys[step], AUTO, method, prompt):
        raise IgnoredKeyError(f"{step} = {all_values[step]!r} would be ignored: this run's backbone is frozen.")
    check_combination(config)
    return config


def _resolve(k: Key, value: Scalar, method: Method, prompt: str) -> Scalar:
    if value != AUTO or k.rule.auto is None:
        return value
    kind = PROMPTS[prompt]
    of_prompt: dict[str, Scalar] = {
        "prompt": prompt,
        "prompt-length": kind.length,
        "prompt-pool": kind.pool,
        "learning-rate": kind.learning_rate,
    }
    return method.defaults.get(k.name, of_prompt.get(k.name, k.rule.auto))


def _keys_for(values: Mapping[str, Any]) -> dict[str, Key]:
    """Every run key, also of a method from outside that ``values`` name; other keys in ``values`` are refused."""
    register(str(values.get("method", "")))
    keys, method = known_keys(), METHODS.get(str(values.get("method", "")))
    if method and (unknown := [name for name in method.defaults if name not in keys]):
        raise ConfigError(f"the row of method {method.name!r} has a default of {unknown[0]!r}, which is no run key.")
    for name in values:
        if name not in keys:
            raise ConfigError(f"{_unknown('run key', name, list(keys))} Its value was {values[name]!r}.")
    return keys


def _unknown(what: str, name: str, names: list[str]) -> str:
    allowed = f"Allowed: {', '.join(sorted(names))}." if what == "method" else "fcil run --help lists all."
    return f"{what} {name!r} does not exist.{did_you_mean(name, names)} {allowed}"


def _refuse_unread(values: Mapping[str, Scalar], method: Method, keys: Mapping[str, Key]) -> None:
    """Refuse a changed key that this run would ignore."""
    readable = {**keys_of(Config), **method.own_keys()}
    for name, value in values.items():
        if value != keys[name].default:
            owner = next((m.name for m in METHODS.values() if name in m.own_keys()), "")
            reader = missing_setting(keys[name], values, keys) if name in readable else f"method {owner!r}"
            if reader:
                own = " For a folder of your own images add dataset=folder." if name == "data-dir" else ""
                raise IgnoredKeyError(f"{name} = {value!r} would be ignored: only {reader} reads it.{own}")


def set_num_clients(config: Config, number: int) -> Config:
    """The same run with the number of clients known.

    Raises:
        ConfigError: too few for clients-per-round or the quorum.
    """
    config = replace(config, num_clients=number)
    check_combination(config)
    return config


def ignored_keys(config: Config) -> list[str]:
    """Changed keys of local training that have no effect, because the method trains nothing at the clients.

    They are accepted, because a suite gives the same keys to all its methods.
    """
    if config.trains_locally:
        return []
    usual = parse({"method": config.method, "prompt": config.prompt}).flat()
    return list(changed_keys(config.flat(), usual, "local training"))


def reads_key(values: Mapping[str, Scalar], name: str, choices: Sequence[Scalar]) -> bool:
    """Whether a run reads the key ``name``, of which there are two ``choices`` or more; ``values`` are its other keys.

    Raises:
        ConfigError: the run is not possible with one of the values.
    """
    try:
        return not any(name in ignored_keys(parse({**values, name: choice})) for choice in choices)
    except IgnoredKeyError:
        return False
