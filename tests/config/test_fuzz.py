"""Config files that somebody damaged, edited or made up: loaded as they are or refused, and never executed."""

from __future__ import annotations

import builtins
import importlib
import json
import math
import os
import pickle
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splittune.config import SplitConfig
from splittune.config.schema import config_to_text
from splittune.errors import ConfigError
from tests.config.example import CONFIG

NUM_CONFIGS = 10_000
TEXT = config_to_text(CONFIG)
MEASURED = ("throughput_samples_per_s", "step_time_s")
"""Kept as floats, whatever JSON calls them."""

CODE = "__import__('os').system('touch executed')"
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 5, 24, -1, -(2**63), 2**53 + 1, 2**63, 10**30, 10**400, 0.0, -0.0, 1.0, 2.5, 1e-320,
    1e308, "", "0", "cpu", "replica", "\x00", "\ud800", "é" * 300, "2026-01-31", "2026-02-31T00:00:00", CODE,
    "!!python/object/apply:os.system ['touch executed']", "csplittune\nSplitConfig\n.", [], [[]], [1], [3, 4, 5],
    [4, 4, 4],
    [3.0, 4, 5], ["3", 4, 5], {}, {"__class__": "os.system"}, {"__reduce__": [CODE]}, {"py/object": "os.system"},
    {"__init__": {}, "__dict__": {}}, {"torch": "2.13.0"}, {"torch": None}, [1] * 3000,
]  # fmt: skip
KEYS = [
    "",
    "seed",
    "Seed",
    "schema ",
    "__class__",
    "__post_init__",
    "self",
    "cls",
    "split",
    "devices",
    "kw_only",
    "é",
    CODE,
]
TOKENS = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "00", "0x10", "+1", ".5", "1.", "1_000", "1" * 5000, "'x'",
    "True",
    "None", "nan", "/* */", "// x\n", ",", ",,", ":", "{", "}", "[", "]", '"', "\\", "\\u12", "\x00", "\ufeff",
    "[" * 3000,
    '{"a":' * 3000, '{"__class__": "os.system"}', CODE, "1e-400", "-0", "1E2", "24.0", "\u2028", "\r", '"\\ud800"',
]  # fmt: skip


def containers(data: Any) -> list[Any]:
    """Every object and list in nested JSON."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    found = [container for value in inner for container in containers(value)]
    return [data, *found] if isinstance(data, dict | list) else found


def change_values(draw: random.Random) -> bytes:
    """One to three places with another value, key, neighbour, depth, or nothing."""
    data = json.loads(TEXT)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        container = draw.choice([one for one in containers(data) if one] or [data])
        if not container:
            break
        place = draw.choice(list(container)) if isinstance(container, dict) else draw.randrange(len(container))
        value = draw.choice(
            [*VALUES, draw.choice(containers(data)), draw.randint(-(2**65), 2**65), draw.uniform(-9, 9)]
        )
        value = json.loads(json.dumps(value))
        action = draw.choice(("replace", "replace", "remove", "add", "nest", "swap"))
        if action == "replace":
            container[place] = value
        elif action == "remove":
            del container[place]
        elif action == "add" and isinstance(container, dict):
            container[draw.choice(KEYS)] = value
        elif action == "add":
            container.insert(place, value)
        elif action == "nest":
            for _ in range(draw.choice((1, 2, 60))):
                container[place] = draw.choice(([container[place]], {"": container[place]}))
        else:
            other = draw.choice(list(container)) if isinstance(container, dict) else draw.randrange(len(container))
            container[place], container[other] = container[other], container[place]
    return json.dumps(data, indent=draw.choice((None, 2))).encode()


def change_text(draw: random.Random) -> bytes:
    """Cut, repeated, or with something else between: a key twice, a token that only some parsers take."""
    text = TEXT
    start, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
    action = draw.choice(("cut", "drop", "token", "token", "number", "repeat", "line", "line"))
    if action == "cut":
        text = text[:start]
    elif action == "drop":
        text = text[:start] + text[min(end, start + draw.choice((1, 2, 30))) :]
    elif action == "token":
        text = text[:start] + draw.choice(TOKENS) + text[start + draw.choice((0, 0, 1, 5)) :]
    elif action == "number":
        numbers = [part for part in text.replace(",", " ").split() if part[0].isdigit()]
        text = text.replace(draw.choice(numbers), draw.choice(TOKENS), draw.choice((1, -1)))
    elif action == "repeat":
        text = text[:start] + text[start:end] * 2 + text[end:]
    else:
        lines = text.splitlines()
        lines.insert(draw.randrange(len(lines)), draw.choice(lines))
        text = "\n".join(lines)
    return text.encode("utf-8", "surrogatepass")


def change_bytes(draw: random.Random) -> bytes:
    """Bits that flipped, another encoding, or what never was JSON."""
    data = bytearray(TEXT, "utf-8")
    action = draw.choice(("flip", "flip", "encoding", "random", "pickle"))
    if action == "flip":
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif action == "encoding":
        data = bytearray(TEXT, draw.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "cp037")))
    elif action == "random":
        data = bytearray(draw.randbytes(draw.randrange(200)))
    else:
        data = bytearray(pickle.dumps(CONFIG, protocol=draw.randrange(6)))
    return bytes(data)


def says_the_same(said: Any, loaded: Any, key: str = "") -> bool:
    """Equal with types: 1 is neither True nor 1.0, but where a float is kept."""
    if key in MEASURED and not isinstance(said, bool) and isinstance(said, int):
        said = float(said)
    if isinstance(said, dict) and isinstance(loaded, dict):
        return said.keys() == loaded.keys() and all(says_the_same(said[key], loaded[key], key) for key in said)
    if isinstance(said, list) and isinstance(loaded, list):
        return len(said) == len(loaded) and all(map(says_the_same, said, loaded))
    return type(said) is type(loaded) and said == loaded


def has_no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key that stands there twice has no one meaning"
    return dict(pairs)


WAYS_TO_EXECUTE: list[tuple[Any, str]] = [
    (builtins, "eval"), (builtins, "exec"), (builtins, "compile"), (os, "system"), (os, "popen"), (pickle, "loads"),
    (pickle, "load"), (subprocess, "Popen"), (importlib, "import_module"),
]  # fmt: skip


class ExecutedError(BaseException):
    """Text of a file has become code; no loader catches it."""


def load(path: Path) -> SplitConfig:
    """The config, while every way from text to code is closed."""

    def execute(*args: object, **options: object) -> None:
        raise ExecutedError(args)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in WAYS_TO_EXECUTE:
            patch.setattr(owner, name, execute)
        return SplitConfig.load(path)


def test_any_file_is_loaded_as_it_is_or_refused(tmp_path: Path, tried: Callable[[str, str, str, str], None]) -> None:
    """10,000 files: each gives a config that says what the file says, or a ConfigError that names the file."""
    path, num_loaded, messages = tmp_path / "split.json", 0, []
    for number in range(NUM_CONFIGS):
        draw = random.Random(number)
        data = draw.choices((change_values, change_text, change_bytes), weights=(6, 3, 1))[0](draw)
        path.write_bytes(data)
        try:
            loaded = load(path)
        except ConfigError as error:
            messages.append(str(error))
            continue
        num_loaded += 1
        said = json.loads(data, object_pairs_hook=has_no_key_twice)
        assert says_the_same(said, json.loads(config_to_text(loaded))), f"file {number}"
        assert all(math.isfinite(said[key]) for key in MEASURED if said[key] is not None), number
        assert sum(loaded.split.micro_batch_sizes) == loaded.split.global_batch_size
    assert NUM_CONFIGS * 0.02 < num_loaded < NUM_CONFIGS * 0.5
    assert all(str(path) in message for message in messages)
    assert max(map(len, messages)) < 1500
    assert list(tmp_path.iterdir()) == [path]
    tried("fuzzed file", f"split.json, {NUM_CONFIGS:,} of them", "equal or ConfigError", "nothing is executed")


def test_the_fuzzing_sees_what_it_looks_for() -> None:
    """The comparison can fail: another value, a type that only compares equal, a key more."""
    assert says_the_same({"step_time_s": 1}, {"step_time_s": 1.0})
    for said, loaded in (({"seed": True}, {"seed": 1}), ({"seed": 1.0}, {"seed": 1}), ({}, {"a": 1}), ([1], [1, 2])):
        assert not says_the_same(said, loaded)
