"""`SplitConfig`: saved and loaded equal or refused with a reason, wrapped on the devices that are there."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import re
import warnings
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splittune.config import SCHEMA, SplitConfig
from splittune.config.schema import config_to_text
from splittune.errors import ConfigError, DeviceError
from splittune.hardware.base import Device
from splittune.hardware.resolve import resolve_hardware
from splittune.split import BatchSplit
from splittune.units import GIB

SPLIT = BatchSplit(global_batch_size=64, accumulation_steps=4, shard_sizes=(1, 5, 5, 5))


def devices(
    count: int = 4, *, name: str = "RTX3090", total_gib: int = 24, torch_device: str = "cpu"
) -> tuple[Device, ...]:
    place = "cuda:{}" if torch_device == "cuda" else torch_device
    return tuple(
        Device(index=index, name=name, torch_device=place.format(index), total_bytes=total_gib * GIB)
        for index in range(count)
    )


def config(**fields: Any) -> SplitConfig:
    """Planned on four virtual cards; `fields` change what the test is about."""
    defaults: dict[str, Any] = {
        "split": SPLIT,
        "devices": devices(),
        "min_headroom_bytes": (GIB,) * 4,
        "planned_peak_reserved_bytes": (20 * GIB,) * 4,
        "virtual_spec": "1xRTX3090:occupied=8GiB,3xRTX3090",
        "is_modelled": True,
        "throughput": 152.4,
        "step_time_s": 0.42,
        "seed": 7,
        "versions": {"splittune": "0.1.0", "torch": "2.13.0", "python": "3.12.1"},
        "created": "2026-01-31T12:00:00+00:00",
    }
    return SplitConfig(**defaults | fields)


def tuned_on_cuda(**fields: Any) -> SplitConfig:
    """Measured on four real cards."""
    real = {"virtual_spec": None, "is_modelled": False, "devices": devices(torch_device="cuda")}
    return config(**real | fields)


class FakeHardware:
    """Devices and a `wrap` that hands back what it was given."""

    def __init__(self, present: tuple[Device, ...], *, is_modelled: bool) -> None:
        self.devices = present
        self.is_modelled = is_modelled

    def wrap(self, model: Any, split: BatchSplit, **options: Any) -> Any:
        return SimpleNamespace(model=model, split=split, hardware=self)


VIRTUAL = FakeHardware(devices(), is_modelled=True)
CUDA = FakeHardware(devices(torch_device="cuda"), is_modelled=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `wrap` asked the resolver for; a string gives the virtual cards, a list the CUDA ones."""
    calls: list[Any] = []

    def resolve(named: Any) -> FakeHardware:
        calls.append(named)
        return VIRTUAL if isinstance(named, str) else CUDA

    monkeypatch.setattr("splittune.config.split_config.resolve_hardware", resolve)
    return calls


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def edited(path: Path, **changes: Any) -> Path:
    """A saved config in which some keys have other values; `...` removes one."""
    data = json.loads(config_to_text(config())) | changes
    return written(path, json.dumps({key: value for key, value in data.items() if value is not ...}))


# what a config is


def test_a_config_is_frozen_and_pickles_and_copies_equal() -> None:
    """A config can be handed to worker processes, and nobody changes it on the way."""
    whole = config()
    with pytest.raises(FrozenInstanceError):
        whole.seed = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert copy.deepcopy(whole) == whole
    assert hash(whole) == hash(config())


def test_versions_and_date_are_filled_in() -> None:
    """Unless given, a config says with which versions and when it was made, in UTC."""
    made = SplitConfig(
        split=SPLIT, devices=devices(), min_headroom_bytes=(0,) * 4, is_modelled=True, virtual_spec="4xRTX3090"
    )
    assert set(made.versions) == {"splittune", "torch", "python"}
    assert made.versions["torch"] == torch.__version__
    assert made.created.endswith("+00:00")


def test_lists_become_tuples_and_versions_are_copied() -> None:
    """What the caller goes on to change does not change the config."""
    versions = {"torch": "2.13.0"}
    made = config(min_headroom_bytes=[1, 2, 3, 4], devices=list(devices()), versions=versions)
    versions["torch"] = "changed"
    assert made.min_headroom_bytes == (1, 2, 3, 4)
    assert isinstance(made.devices, tuple)
    assert made.versions == {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": (1, 2)}, "expected a BatchSplit"),
        ({"devices": devices(3)}, "3 devices for 4 shards: expected one a shard"),
        ({"devices": "4xRTX3090"}, "devices is '4xRTX3090': expected a tuple with one entry a device"),
        ({"devices": ("cuda:0",) * 4}, "devices[0] is 'cuda:0': expected a Device"),
        ({"devices": devices()[::-1]}, "devices[0].index is 3: expected 0, its place in the list"),
        ({"devices": (*devices(3), replace(devices()[3], total_bytes=0))}, "devices[3].total_bytes is 0"),
        ({"devices": (*devices(3), replace(devices()[3], name=""))}, "devices[3].name is ''"),
        ({"min_headroom_bytes": ()}, "min_headroom_bytes has 0 entries for 4 devices"),
        ({"min_headroom_bytes": (1, 2, 3, -4)}, "min_headroom_bytes[3] is -4: expected an integer of at least 0"),
        ({"min_headroom_bytes": (1, 2, 3, 4.0)}, "min_headroom_bytes[3] is 4.0: expected an integer"),
        ({"min_headroom_bytes": GIB}, "expected a tuple with one entry a device"),
        ({"planned_peak_reserved_bytes": (1, 2)}, "planned_peak_reserved_bytes has 2 entries for 4 devices"),
        ({"throughput": 0}, "throughput is 0: expected a finite number above 0, or None"),
        ({"throughput": math.nan}, "throughput is nan"),
        ({"throughput": True}, "throughput is True"),
        ({"throughput": 10**400}, "throughput is 1000"),
        ({"step_time_s": math.inf}, "step_time_s is inf"),
        ({"step_time_s": "0.4"}, "step_time_s is '0.4'"),
        ({"seed": -1}, "seed is -1: expected an integer of at least 0"),
        ({"seed": True}, "seed is True"),
        ({"eval_batch_size": 0}, "eval_batch_size is 0: expected an integer of at least 1"),
        ({"eval_batch_size": 2.0}, "eval_batch_size is 2.0"),
        ({"is_modelled": 1}, "is_modelled is 1: expected True or False"),
        ({"is_modelled": False}, "expected is_modelled True for virtual devices, or virtual_spec None"),
        ({"virtual_spec": ""}, "virtual_spec is '': expected a string that is not empty"),
        ({"versions": {"torch": 2}}, "versions['torch'] is 2"),
        ({"versions": ["torch"]}, "versions is ['torch']"),
        ({"created": "yesterday"}, "created is 'yesterday': expected an ISO 8601 date"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """Every field is checked, and the message says which it is, what it is, and what was expected."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(**fields)


def test_a_config_without_measured_figures_is_legal() -> None:
    """What was not measured is None or empty, never 0."""
    assert config(throughput=None, step_time_s=None, planned_peak_reserved_bytes=()).throughput is None


def test_summary_is_one_line_with_split_devices_and_figures() -> None:
    """One line says what to train with, where, how fast, and whether that is modelled."""
    expected = (
        "64 = 4 x (1 + 5 + 5 + 5) on 1xRTX3090:occupied=8GiB,3xRTX3090, 152.4 samples/s, 420.0 ms a step (modelled)"
    )
    assert config().summary() == str(config()) == expected
    assert tuned_on_cuda(throughput=None, step_time_s=None).summary() == (
        "64 = 4 x (1 + 5 + 5 + 5) on RTX3090, RTX3090, RTX3090, RTX3090"
    )


# save and load


@st.composite
def configs(draw: st.DrawFn) -> SplitConfig:
    """Any config: other sizes, names in any script, figures absent."""
    shard_sizes = draw(st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any))
    steps = draw(st.integers(1, 40))
    count, names = len(shard_sizes), st.text(min_size=1, max_size=9)
    sizes = st.lists(st.integers(0, 2**50), min_size=count, max_size=count)
    figures = st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
    return SplitConfig(
        split=BatchSplit(
            global_batch_size=sum(shard_sizes) * steps, accumulation_steps=steps, shard_sizes=tuple(shard_sizes)
        ),
        devices=tuple(
            Device(
                index=index,
                name=draw(names),
                torch_device=draw(names),
                total_bytes=draw(st.integers(1, 2**50)),
                uuid=draw(st.none() | names),
            )
            for index in range(count)
        ),
        min_headroom_bytes=tuple(draw(sizes)),
        planned_peak_reserved_bytes=draw(st.just(()) | sizes.map(tuple)),
        virtual_spec=draw(st.none() | names),
        is_modelled=True,
        eval_batch_size=draw(st.none() | st.integers(1, 2**40)),
        throughput=draw(figures),
        step_time_s=draw(figures),
        seed=draw(st.integers(0, 2**40)),
        versions=draw(st.dictionaries(names, names, max_size=3)),
        created=draw(st.datetimes()).isoformat(),
    )


@given(saved=configs())
def test_what_is_saved_is_loaded_equal(saved: SplitConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any config comes back equal, and saving it again gives the same bytes."""
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    saved.save(path)
    first = path.read_bytes()
    loaded = SplitConfig.load(path)
    assert loaded == saved
    loaded.save(path)
    assert path.read_bytes() == first


def test_numpys_integers_are_saved_as_integers(tmp_path: Path) -> None:
    """Whatever kind of integer a field was given, the config is equal to one of plain integers, and so is its file."""
    given, plain = (
        config(seed=kind(3), eval_batch_size=kind(96), min_headroom_bytes=tuple(map(kind, (4, 3, 2, 1))))
        for kind in (np.int64, int)
    )
    assert given == plain
    assert given.save(tmp_path / "given").read_text() == given.save(tmp_path / "plain").read_text()


def test_the_file_is_json_for_people(tmp_path: Path) -> None:
    """The file is indented, ends in a newline, has its schema first and units in its key names."""
    text = config().save(tmp_path / "split.json").read_text()
    data = json.loads(text)
    assert text.startswith('{\n  "schema": 1,\n')
    assert text.endswith("}\n")
    assert "eval_batch_size" not in data
    assert data["split"] == {"global_batch_size": 64, "accumulation_steps": 4, "shard_sizes": [1, 5, 5, 5]}
    assert data["throughput_samples_per_s"] == 152.4
    assert data["step_time_s"] == 0.42
    assert data["devices"][3] == asdict(devices()[3])


def test_a_file_is_written_in_the_oldest_schema_that_can_say_it(tmp_path: Path) -> None:
    """Any splittune reads a file that says nothing new; an evaluation batch size or ranks need a newer one."""
    for fields, schema in (({}, 1), ({"eval_batch_size": 512}, 2), ({"strategy": "ddp"}, SCHEMA)):
        path = config(**fields).save(tmp_path / "split.json")
        assert json.loads(path.read_text())["schema"] == schema
        assert SplitConfig.load(path) == config(**fields)
    with pytest.raises(ConfigError, match=r"the config has the unknown 'eval_batch_size'"):
        SplitConfig.load(edited(tmp_path / "split.json", eval_batch_size=512))
    with pytest.raises(ConfigError, match=r"the config lacks eval_batch_size"):
        SplitConfig.load(edited(tmp_path / "split.json", schema=2))
    with pytest.raises(ConfigError, match=r"the config has the unknown 'strategy'"):
        SplitConfig.load(edited(tmp_path / "split.json", schema=2, eval_batch_size=512, strategy="ddp"))


def test_a_config_without_a_strategy_is_for_one_process(tmp_path: Path) -> None:
    """A file from before there were ranks loads as what it was."""
    assert SplitConfig.load(config().save(tmp_path / "split.json")).strategy == "dp"


def test_saving_makes_folders_and_leaves_no_other_file(tmp_path: Path) -> None:
    """The folder is made, the old file is replaced, and nothing temporary stays behind."""
    path = tmp_path / "runs" / "one" / "split.json"
    config(seed=1).save(path)
    assert config(seed=2).save(str(path)) == path
    assert SplitConfig.load(path).seed == 2
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the disk is written to leaves the file that was there, and nothing else."""
    path = config(seed=1).save(tmp_path / "split.json")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        config(seed=2).save(path)
    assert SplitConfig.load(path).seed == 1
    assert list(tmp_path.iterdir()) == [path]


def test_saving_follows_a_link(tmp_path: Path) -> None:
    """A link stays a link: what it points to is replaced."""
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    config().save(link)
    assert link.is_symlink()
    assert SplitConfig.load(real) == config()


@pytest.mark.parametrize("place", ["file/split.json", "."])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    """An unwritable path is a ConfigError with the system's reason and what to do."""
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"cannot write .*: .*Expected the path of a file.*Choose another path"):
        config().save(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_file_says_what_writes_one(tmp_path: Path) -> None:
    """A path that does not exist is a ConfigError that names it and says where such files come from."""
    with pytest.raises(
        ConfigError, match=r"cannot read .*nowhere\.json: No such file.*result\.save wrote.*Is the path"
    ):
        SplitConfig.load(tmp_path / "nowhere.json")


def test_a_folder_is_told_from_a_file(tmp_path: Path) -> None:
    """The folder that was saved to is not the file in it, and the message says so."""
    with pytest.raises(ConfigError, match="This is a folder: name the file in it"):
        SplitConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no complete JSON: Expecting value at line 1, column 1, of 0 characters"),
        ("null", "expected an object with the keys schema,"),
        ("[1, 2]", "this JSON is [1, 2]: expected an object"),
        ("{}", "schema is missing: expected an integer from 1 to 3. Is this a splittune config at all?"),
        ('{"schema": 1}', "the config lacks created, versions, split"),
        ('{"schema": 1, "schema": 2}', "the keys 'schema' stand there twice"),
        ('{"schema": NaN}', "a number is NaN: expected finite numbers only"),
        ('{"schema": -Infinity}', "a number is -Infinity"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": ' + "1" * 5_000 + "}", "restore the file as it was saved"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Whatever the file holds, the error is a ConfigError that names the file and what is wrong."""
    path = written(tmp_path / "split.json", text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        SplitConfig.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, a pickle say, are refused and never run."""
    path = tmp_path / "split.json"
    path.write_bytes(pickle.dumps(config()))
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        SplitConfig.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"split": {"global_batch_size": 64, "accumulation_steps": 4, "shard_sizes": [1, 5, 5, 6]}},
            "1 + 5 + 5 + 6 = 17",
        ),
        ({"split": {"global_batch_size": 64, "accumulation_steps": 4}}, "split lacks shard_sizes"),
        (
            {"split": {"global_batch_size": 64, "accumulation_steps": 4, "shard_sizes": 16}},
            "shard_sizes is 16: expected a list",
        ),
        ({"split": [64, 4, 16]}, "split is [64, 4, 16]: expected an object with the keys global_batch_size"),
        ({"seed": ...}, "the config lacks seed"),
        ({"sead": 1}, "has the unknown 'sead'"),
        ({"seed": ..., "sead": 1}, "lacks seed and has the unknown 'sead'"),
        ({"devices": []}, "0 devices for 4 shards"),
        ({"devices": [{"index": 0}] * 4}, "devices[0] lacks name, torch_device, total_bytes, uuid"),
        ({"devices": 4}, "devices is 4: expected a list"),
        ({"min_headroom_bytes": 0}, "min_headroom_bytes is 0: expected a list"),
        ({"throughput_samples_per_s": -1}, "throughput is -1: expected a finite number above 0"),
        ({"created": None}, "created is None"),
        ({"schema": 4}, "schema is 4, newer than this splittune reads: expected at most 3"),
        ({"schema": 4, "versions": {"splittune": "9.1"}}, "written by splittune '9.1': upgrade splittune"),
        ({"schema": 4, "versions": None}, "of a later version: upgrade splittune"),
        ({"schema": 2, "eval_batch_size": 0}, "eval_batch_size is 0: expected an integer of at least 1"),
        ({"schema": 2, "eval_batch_size": "512"}, "eval_batch_size is '512'"),
        (
            {"schema": 3, "eval_batch_size": None, "strategy": "fsdp"},
            "strategy is 'fsdp': expected one of ('dp', 'ddp')",
        ),
        ({"schema": 3, "eval_batch_size": None, "strategy": ["dp"]}, "strategy is ['dp']: expected one of"),
        ({"schema": 0}, "schema is 0: expected an integer from 1 to 3"),
        ({"schema": "1"}, "schema is '1'"),
        ({"schema": True}, "schema is True"),
    ],
)
def test_an_edited_file_is_refused_with_the_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A field that is missing, unknown, ill-typed, out of range or newer is named, with what was expected."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        SplitConfig.load(edited(tmp_path / "split.json", **changes))
    assert str(caught.value).endswith("Failing that, restore the file as it was saved, or tune again.")


def test_a_number_beyond_floats_is_refused(tmp_path: Path) -> None:
    """A figure that JSON can write and a float cannot hold is not silently infinite."""
    text = config_to_text(config()).replace("152.4", "1e999")
    with pytest.raises(ConfigError, match="throughput is inf"):
        SplitConfig.load(written(tmp_path / "split.json", text))


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    """Cut anywhere, the file is refused; only the last newline may be missing."""
    text = config_to_text(config())
    path = tmp_path / "split.json"
    for length in range(len(text) - 1):
        with pytest.raises(ConfigError, match="no complete JSON"):
            SplitConfig.load(written(path, text[:length]))
    assert SplitConfig.load(written(path, text[:-1])) == config()


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested JSON, as the keys that lead there."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else []
    return [place for key in keys for place in [(*path, key), *places(data[key], (*path, key))]]


PLACES = places(json.loads(config_to_text(config())))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=2000)
@given(place=st.sampled_from(PLACES), value=json_values, action=st.sampled_from(["replace", "remove", "add"]))
@example(place=("split", "shard_sizes", 1), value=5.0, action="replace")
@example(place=("split", "accumulation_steps"), value=True, action="replace")
@example(place=("devices", 0, "total_bytes"), value=1e10, action="replace")
@example(place=("throughput_samples_per_s",), value=2**53 + 1, action="replace")
def test_a_mutated_file_is_loaded_as_it_is_or_refused(
    place: tuple[Any, ...], value: Any, action: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any value at any place: the config loaded says what the file says, or the file is refused with a ConfigError."""
    data = json.loads(config_to_text(config()))
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    if action == "replace":
        holder[place[-1]] = value
    elif action == "remove":
        del holder[place[-1]]
    elif isinstance(holder, list):
        holder.insert(place[-1], value)
    else:
        holder[f"{place[-1]}_"] = value
    path = written(tmp_path_factory.getbasetemp() / "mutated.json", json.dumps(data))
    try:
        loaded = SplitConfig.load(path)
    except ConfigError:
        return
    assert json.loads(config_to_text(loaded)) == data


@settings(max_examples=1000)
@given(at=st.integers(0, len(config_to_text(config())) - 1), replacement=st.binary(min_size=0, max_size=3))
def test_a_file_with_damaged_bytes_is_loaded_as_it_is_or_refused(
    at: int, replacement: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes changed or lost anywhere never give anything but a config equal to what the file says, or a ConfigError."""
    whole = config_to_text(config()).encode()
    damaged = whole[:at] + replacement + whole[at + 1 :]
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(damaged)
    try:
        loaded = SplitConfig.load(path)
    except ConfigError:
        return
    assert json.loads(config_to_text(loaded)) == json.loads(damaged)


# wrap


def test_wrap_resolves_what_was_recorded(asked: list[Any]) -> None:
    """Without devices the virtual ones are made again, or the recorded torch devices taken, without a warning."""
    model = torch.nn.Linear(2, 2)
    wrapped: Any = config().wrap(model)
    assert (wrapped.model, wrapped.split, wrapped.hardware) == (model, SPLIT, VIRTUAL)
    on_cuda: Any = tuned_on_cuda().wrap(model)
    assert on_cuda.hardware is CUDA
    assert asked == ["1xRTX3090:occupied=8GiB,3xRTX3090", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]]


def test_wrap_takes_the_devices_named(asked: list[Any]) -> None:
    """Devices that are named are resolved as they are named; other identical cards need no warning."""
    named = ["cuda:3", "cuda:2", "cuda:1", "cuda:0"]
    tuned_on_cuda().wrap(torch.nn.Linear(2, 2), devices=named)
    assert asked == [named]


def test_wrap_takes_hardware_at_hand(asked: list[Any]) -> None:
    """A hardware that is given is used, and nothing is resolved."""
    hardware: Any = VIRTUAL
    wrapped: Any = config().wrap(torch.nn.Linear(2, 2), hardware=hardware)
    assert wrapped.hardware is VIRTUAL
    assert asked == []


def test_wrap_refuses_devices_and_hardware_together() -> None:
    """Two answers to one question are refused."""
    hardware: Any = VIRTUAL
    with pytest.raises(ConfigError, match=r"devices=\['cuda:0'\] and hardware= as well: expected at most one"):
        config().wrap(torch.nn.Linear(2, 2), devices=["cuda:0"], hardware=hardware)


def test_a_plan_on_real_cards_warns_that_it_was_not_measured(asked: list[Any]) -> None:
    """Planned on virtual cards, trained on real ones by naming them: that works, and says it was
    never measured there."""
    with pytest.warns(
        UserWarning, match=r"planned on virtual devices \(RTX3090, .*not measured on RTX3090.*tune again"
    ) as caught:
        wrapped: Any = config().wrap(torch.nn.Linear(2, 2), devices=["cuda:0", "cuda:1", "cuda:2", "cuda:3"])
    assert wrapped.hardware is CUDA
    assert caught[0].filename == __file__


def test_other_cards_than_the_tuned_ones_are_listed() -> None:
    """A config tuned on other cards says which differ, in name or memory, and only those."""
    present = (*devices(2, torch_device="cuda"), *devices(4, name="RTX4090", torch_device="cuda")[2:])
    hardware: Any = FakeHardware(
        (*present[:3], replace(present[3], name="RTX3090", total_bytes=12 * GIB)), is_modelled=False
    )
    with pytest.warns(UserWarning, match="tuned on other devices") as caught:
        tuned_on_cuda().wrap(torch.nn.Linear(2, 2), hardware=hardware)
    message = str(caught[0].message)
    assert "device 2 was RTX3090 of 24.00 GiB (25769803776 bytes), is RTX4090 of 24.00 GiB" in message
    assert "device 3 was RTX3090 of 24.00 GiB (25769803776 bytes), is RTX3090 of 12.00 GiB" in message
    assert "device 0" not in message


def test_the_same_cards_give_no_warning() -> None:
    """Other UUIDs of the same model and memory are no other cards."""
    hardware: Any = FakeHardware(tuple(replace(device, uuid="GPU-1") for device in CUDA.devices), is_modelled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned_on_cuda().wrap(torch.nn.Linear(2, 2), hardware=hardware)


def test_another_number_of_devices_is_refused() -> None:
    """There must be one device a shard; the message counts both and says what to do."""
    hardware: Any = FakeHardware(devices(2), is_modelled=True)
    message = "got 2 (RTX3090, RTX3090), expected 4, one for each shard of 64 = 4 x (1 + 5 + 5 + 5)"
    with pytest.raises(ConfigError, match=re.escape(message)):
        config().wrap(torch.nn.Linear(2, 2), hardware=hardware)


def test_devices_that_are_gone_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tuned devices cannot be had, the error says which they were and how to name others."""

    def resolve(named: Any) -> FakeHardware:
        raise DeviceError(f"there is no {named[0]} here.")

    monkeypatch.setattr("splittune.config.split_config.resolve_hardware", resolve)
    with pytest.raises(DeviceError, match=r"tuned on \(RTX3090, .*there is no cuda:0 here\. Name those to train on"):
        tuned_on_cuda().wrap(torch.nn.Linear(2, 2))
    with pytest.raises(DeviceError, match=r"^there is no cuda:7 here\.$"):
        tuned_on_cuda().wrap(torch.nn.Linear(2, 2), devices=["cuda:7"])


def test_virtual_devices_without_a_spec_must_be_named(asked: list[Any]) -> None:
    """A plan that does not say how to make its virtual devices is not run on the CPU by mistake."""
    with pytest.raises(ConfigError, match=r"virtual_spec is None\. Name the devices"):
        config(virtual_spec=None).wrap(torch.nn.Linear(2, 2))
    assert asked == []


def test_a_loaded_config_trains_on_its_virtual_devices(tmp_path: Path) -> None:
    """Saved, loaded, wrapped and run by micro-batches, a config gives the gradient of the whole batch on one device."""
    hardware = resolve_hardware("1xRTX3090:occupied=8GiB,3xRTX3090")
    config(devices=hardware.devices).save(tmp_path / "split.json")
    loaded = SplitConfig.load(tmp_path / "split.json")

    torch.manual_seed(0)
    inputs, targets = torch.randn(50, 3), torch.randn(50, 2)  # a short last batch of the 64 it was tuned for
    alone = torch.nn.Linear(3, 2)
    model = loaded.wrap(copy.deepcopy(alone))
    for micro in loaded.micro_batches((inputs, targets)):
        own_inputs, own_targets = micro.batch
        loss = torch.nn.functional.mse_loss(model(own_inputs), own_targets.to(model.output_device)) * micro.weight
        loss.backward()
    torch.nn.functional.mse_loss(alone(inputs), targets).backward()
    for tuned, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(tuned.grad, expected.grad)
