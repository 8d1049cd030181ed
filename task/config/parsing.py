"""From run keys as they come to one checked Config: unknown keys and wrong values end here, "auto" is filled in."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from task.config.checks import check_combination
from task.config.schema import OF_THE_NODE, Config, defaults, keys_affecting, known_keys, missing_setting
from task.keys import AUTO, ConfigError, Key, keys_of
from task.message import Scalar
from task.methods import METHODS, Method, register
from task.prompts.kinds import PROMPTS


def apply_node_settings(values: Mapping[str, Scalar], settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """A run's values on one node: the node's device and paths win over the run's, if the run reads such keys."""
    known, run = known_keys(), {**defaults(), **values}
    read = [name for name in keys_affecting(*OF_THE_NODE) if not missing_setting(known[name], run, known)]
    return {**values, **{name: settings[name] for name in read if name in settings}}


def parse_text(pairs: Mapping[str, str]) -> dict[str, Scalar]:
    """Typed values from unquoted command-line text.

    Raises:
        ConfigError: an unknown key or a text that the key's type cannot be.
    """
    register(pairs.get("method", ""))
    known = known_keys()
    _refuse_unknown(pairs, known)
    return {name: known[name].from_text(text) for name, text in pairs.items()}


def check_values(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The same run keys, each checked by itself and in its key's type.

    Raises:
        ConfigError: an unknown key or a value that the key cannot have.
    """
    register(str(values.get("method", "")))
    known = known_keys()
    _refuse_unknown(values, known)
    return {name: known[name].check(value) for name, value in values.items()}


def parse(values: Mapping[str, Scalar]) -> Config:
    """Check every value and every combination, and fill keys left at "auto" from the method.

    Args:
        values: run keys in kebab-case; missing ones take their defaults.

    Raises:
        ConfigError: names the key, the value given and what is allowed.
    """
    given = check_values(values)
    known = known_keys()
    checked = defaults() | given
    method = METHODS.get(str(checked["method"]))
    if method is None:
        raise ConfigError(_unknown("method", str(checked["method"]), list(METHODS)))
    prompt = str(method.prompts[0] if checked["prompt"] == AUTO else checked["prompt"])
    _refuse_unread(checked | {"prompt": prompt}, method, known)
    core = {n.replace("-", "_"): _resolve(k, checked[n], method, prompt) for n, k in keys_of(Config).items()}
    own = {name.removeprefix(f"{method.name}-").replace("-", "_"): checked[name] for name in method.own_keys()}
    config = Config(**core, options=method.options(**own))  # type: ignore[arg-type]  # each was checked above
    step = "backbone-learning-rate"
    if not config.trains_backbone and config.backbone_learning_rate != _resolve(known[step], AUTO, method, prompt):
        raise ConfigError(f"{step} = {checked[step]!r} would be ignored: this run's backbone is frozen.")
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


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Key]) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(_unknown("run key", name, list(known)))


def _unknown(what: str, name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what} {name!r} does not exist.{hint} Allowed: {', '.join(sorted(names))}."


def _refuse_unread(checked: Mapping[str, Scalar], method: Method, known: Mapping[str, Key]) -> None:
    """A key that this run would ignore must not look as if it did something."""
    mine = {**keys_of(Config), **method.own_keys()}
    for name, value in checked.items():
        if value != known[name].default:
            owner = next((m.name for m in METHODS.values() if name in m.own_keys()), "")
            reader = missing_setting(known[name], checked, known) if name in mine else f"method {owner!r}"
            if reader:
                raise ConfigError(f"{name} = {value!r} would be ignored: only {reader} reads it.")


def set_num_clients(config: Config, number: int) -> Config:
    """The same run with the number of clients known.

    Raises:
        ConfigError: too few for clients-per-round or the quorum.
    """
    completed = replace(config, num_clients=number)
    check_combination(completed)
    return completed


def ignored_keys(config: Config) -> list[str]:
    """Keys of local training that are not at their defaults, where the method trains nothing locally.

    They are accepted, as one set of keys may serve many methods.
    """
    if config.row.client:
        return []
    values, usual = config.flat(), parse({"method": config.method, "prompt": config.prompt}).flat()
    return [name for name in keys_affecting("local training") if values[name] != usual[name]]
