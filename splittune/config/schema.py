"""The JSON text of a `SplitConfig`: written for people, read with suspicion.

One object, every key required and none other allowed, units in the key names. A config is written in the oldest schema
that can say it: 1 as shown; 2 has ``"eval_batch_size": 512`` as well, and is written where that is known; 3 has
``"strategy": "ddp"`` besides, and is written where several processes train::

    {
        "schema": 1,
        "created": "2026-01-31T12:00:00+00:00",
        "versions": {"splittune": "0.1.0", "torch": "2.13.0", "python": "3.12.1"},
        "split": {"global_batch_size": 64, "accumulation_steps": 4, "shard_sizes": [1, 5, 5, 5]},
        "loss_placement": "output",
        "throughput_samples_per_s": 152.4,
        "step_time_s": 0.42,
        "is_modelled": true,
        "virtual_spec": "4xRTX3090",
        "seed": 0,
        "min_headroom_bytes": [536870912, 536870912, 536870912, 536870912],
        "planned_peak_reserved_bytes": [17179869184, 16106127360, 16106127360, 16106127360],
        "devices": [
            {"index": 0, "name": "RTX3090", "torch_device": "cpu", "total_bytes": 25769803776, "uuid": null},
            ...,
        ],
    }

This module knows the keys and what holds them; whether the values make sense is `SplitConfig`'s own check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any

from splittune.errors import ConfigError
from splittune.hardware.base import Device
from splittune.split import BatchSplit

if TYPE_CHECKING:
    from splittune.config.data import ConfigData

SCHEMA = 3
"""The newest; raised by one whenever an older splittune could no longer read what this one writes."""

_SPLIT_KEYS = tuple(field.name for field in fields(BatchSplit))
_DEVICE_KEYS = tuple(field.name for field in fields(Device))
_KEYS = (
    "schema",
    "created",
    "versions",
    "split",
    "strategy",
    "loss_placement",
    "eval_batch_size",
    "throughput_samples_per_s",
    "step_time_s",
    "is_modelled",
    "virtual_spec",
    "seed",
    "min_headroom_bytes",
    "planned_peak_reserved_bytes",
    "devices",
)
_SINCE = {"eval_batch_size": 2, "strategy": 3}


def config_to_text(config: ConfigData) -> str:
    """`config` as indented JSON that ends in a newline; `fields_from_text` reads it back."""
    schema = 3 if config.strategy != "dp" else 1 if config.eval_batch_size is None else 2
    values = {key: getattr(config, key) for key in _KEYS if key not in ("schema", "throughput_samples_per_s")}
    data: dict[str, Any] = {"schema": schema, "throughput_samples_per_s": config.throughput, **values}
    data |= {"split": asdict(config.split), "devices": [asdict(device) for device in config.devices]}
    return json.dumps({key: data[key] for key in _keys_of(schema)}, indent=2, allow_nan=False) + "\n"


def fields_from_text(text: str) -> dict[str, Any]:
    """The keyword arguments of `SplitConfig` that `text` holds.

    Raises:
        ConfigError: no JSON, a number that is none (NaN, Infinity), a key twice, missing or unknown, another schema.
        InvalidSplitError: shards that do not sum, and the like.
    """
    data = _parse(text)
    _check_schema(data)
    keys = _keys_of(data["schema"])
    _check_keys("the config", data, keys)
    split, devices = data["split"], data["devices"]
    _check_keys("split", split, _SPLIT_KEYS)
    _check_list("split.shard_sizes", split["shard_sizes"])
    for key in ("min_headroom_bytes", "planned_peak_reserved_bytes", "devices"):
        _check_list(key, data[key])
    for index, device in enumerate(devices):
        _check_keys(f"devices[{index}]", device, _DEVICE_KEYS)
    named_as_they_are = {key: data[key] for key in keys if key not in ("schema", "throughput_samples_per_s")}
    return named_as_they_are | {
        "throughput": data["throughput_samples_per_s"],
        "split": BatchSplit(**split),
        "devices": tuple(Device(**device) for device in devices),
    }


def _keys_of(schema: int) -> tuple[str, ...]:
    return tuple(key for key in _KEYS if schema >= _SINCE.get(key, 1))


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_dict_of_distinct_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"this is no complete JSON: {error.msg} at line {error.lineno}, column {error.colno}, of {len(text)} "
            "characters. Expected what SplitConfig.save writes; the file may have been cut short or edited."
        ) from error
    except RecursionError as error:
        raise ConfigError("this JSON is nested too deeply for a config: expected three levels.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"this JSON is {short_repr(data)}: expected an object with the keys {', '.join(_KEYS)}.")
    return data


def _check_schema(data: dict[str, Any]) -> None:
    schema = data.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        got = f"is {short_repr(schema)}" if "schema" in data else "is missing"
        raise ConfigError(f"schema {got}: expected an integer from 1 to {SCHEMA}. Is this a splittune config at all?")
    if schema > SCHEMA:
        versions = data.get("versions")
        writer = versions.get("splittune") if isinstance(versions, dict) else None
        raise ConfigError(
            f"schema is {schema}, newer than this splittune reads: expected at most {SCHEMA}. It was written by "
            f"splittune {short_repr(writer) if writer else 'of a later version'}: upgrade splittune."
        )


def _check_keys(what: str, data: object, expected: tuple[str, ...]) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{what} is {short_repr(data)}: expected an object with the keys {', '.join(expected)}.")
    missing = [key for key in expected if key not in data]
    unknown = [short_repr(key) for key in data if key not in expected]
    if missing or unknown:
        got = [f"lacks {', '.join(missing)}"] if missing else []
        got += [f"has the unknown {', '.join(unknown)}"] if unknown else []
        raise ConfigError(f"{what} {' and '.join(got)}: expected exactly the keys {', '.join(expected)}.")


def _check_list(what: str, value: object) -> None:
    if not isinstance(value, list):
        raise ConfigError(f"{what} is {short_repr(value)}: expected a list with one entry a device.")


def _refuse_constant(constant: str) -> float:
    raise ConfigError(f"a number is {constant}: expected finite numbers only, and null for what is not known.")


def _dict_of_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({short_repr(key) for key in keys if keys.count(key) > 1})
        raise ConfigError(f"the keys {', '.join(repeated)} stand there twice: expected each once. Delete one of them.")
    return data
