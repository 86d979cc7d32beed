from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.errors import DeviceError
from splittune.hardware.virtual.catalog import GPUS, MAX_DEVICES, GpuModel, find_gpu, parse_gpus
from splittune.units import GIB, MIB

NAMES = [gpu.name for gpu in GPUS]


def test_the_catalog_is_as_wide_as_promised():
    """At least a dozen GPUs of several generations, every name once."""
    assert len(NAMES) >= 12
    assert len({name.lower() for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("gpu", GPUS, ids=NAMES)
def test_every_entry_says_where_its_figures_were_published(gpu):
    """A source names the vendor, a document and a year."""
    vendor, _, document = gpu.source.partition(", ")
    assert vendor == "NVIDIA"
    assert any(f"20{year}" in document for year in range(16, 27))


@pytest.mark.parametrize("gpu", GPUS, ids=NAMES)
def test_every_entry_has_figures_in_the_units_it_states(gpu):
    """Bytes, bytes/s and FLOP/s lie where those of real GPUs do: a slip of 1000 or of a unit would not."""
    assert 4 * GIB <= gpu.total_bytes <= 256 * GIB
    assert gpu.total_bytes % GIB == 0
    assert 5e10 < gpu.memory_bandwidth_bytes_per_s < 1e13
    assert 1e12 < gpu.fp32_flops_per_s < 2e14
    assert gpu.fp32_flops_per_s <= gpu.half_flops_per_s < 3e15
    assert gpu.link_bandwidth_bytes_per_s in {15.75e9, 31.5e9, 63e9}


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.name.endswith("GB")], ids=lambda gpu: gpu.name)
def test_a_memory_in_the_name_is_the_memory_of_the_entry(gpu):
    """V100-32GB has 32 GiB."""
    assert gpu.name.endswith(f"-{gpu.total_bytes // GIB}GB")


@pytest.mark.parametrize(
    ("name", "gib", "bandwidth", "fp32", "half"),
    [
        ("V100-16GB", 16, 900e9, 15.7e12, 125e12),
        ("RTX3090", 24, 936e9, 35.6e12, 71e12),
        ("A100-80GB", 80, 2039e9, 19.5e12, 312e12),
        ("H100-80GB", 80, 3350e9, 67e12, 989.5e12),
    ],
)
def test_known_figures_are_the_published_ones(name, gib, bandwidth, fp32, half):
    """Figures of well-known GPUs, to the digit."""
    gpu = find_gpu(name)
    assert gpu.total_bytes == gib * GIB
    assert (gpu.memory_bandwidth_bytes_per_s, gpu.fp32_flops_per_s, gpu.half_flops_per_s) == (bandwidth, fp32, half)


def test_an_entry_is_frozen():
    """Published figures cannot be changed by whoever reads them."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPUS[0].total_bytes = 1


@pytest.mark.parametrize(
    "field",
    [
        "total_bytes",
        "memory_bandwidth_bytes_per_s",
        "fp32_flops_per_s",
        "half_flops_per_s",
        "link_bandwidth_bytes_per_s",
    ],
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_figure_that_is_not_positive_is_refused(field, value):
    """A peak of nothing would divide by zero later, so it is refused with its name."""
    figures = dataclasses.asdict(GPUS[0]) | {"name": "Mine", field: value}
    with pytest.raises(ValueError, match=f"GpuModel.{field} of Mine is {value}: expected more than 0"):
        GpuModel(**figures)


@pytest.mark.parametrize("spelling", ["RTX3090", "rtx3090", "RTX 3090", "rtx-3090", " Rtx_3090 "])
def test_spelling_does_not_matter(spelling):
    """Case, spaces, hyphens and underscores do not count."""
    assert find_gpu(spelling).name == "RTX3090"


@pytest.mark.parametrize("gpu", GPUS, ids=NAMES)
def test_every_entry_is_found_by_its_own_name(gpu):
    """A name finds its own entry and never a longer one's: A10 is not A100, L4 is not L40S."""
    assert find_gpu(gpu.name) is gpu
    assert find_gpu(gpu.name.lower().replace("-", " ")) is gpu


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("V100", "V100-16GB or V100-32GB"),
        ("a100", "A100-40GB or A100-80GB"),
        ("RTX 3080", "RTX3080-10GB"),
    ],
)
def test_a_name_that_leaves_the_memory_open_is_not_guessed(name, variants):
    """A model sold with several memories needs the one that is meant: the error shows them."""
    with pytest.raises(DeviceError) as caught:
        find_gpu(name)
    assert str(caught.value) == f"GPU {name!r} leaves its memory open: expected {variants}. Say which."


@pytest.mark.parametrize(("name", "near"), [("RTX309", "RTX3090"), ("V100-16", "V100-16GB"), ("GTX1080", "GTX1080Ti")])
def test_an_unknown_name_is_answered_with_near_ones(name, near):
    """A slip of the keyboard gets the names it resembles."""
    with pytest.raises(DeviceError, match=f"GPU '{name}' is not in the catalog: expected one of .* mean .*{near}"):
        find_gpu(name)


@pytest.mark.parametrize("name", ["", "RTX30", "Voodoo", "?"])
def test_a_name_like_no_other_is_answered_with_all(name):
    """A name that resembles none gets the whole list."""
    with pytest.raises(DeviceError) as caught:
        find_gpu(name)
    assert all(known in str(caught.value) for known in NAMES)


def test_a_specification_gives_every_device_in_order():
    """Groups are spelled out device by device, in order, with the bytes occupied on each."""
    gpus = parse_gpus("1xRTX3090:occupied=20GiB,2xRTX4090,V100-16GB:occupied=512MiB")
    assert [(gpu.name, occupied) for gpu, occupied in gpus] == [
        ("RTX3090", 20 * GIB),
        ("RTX4090", 0),
        ("RTX4090", 0),
        ("V100-16GB", 512 * MIB),
    ]


@pytest.mark.parametrize("spec", ["4xV100-16GB", "4 x V100-16GB", " 4Xv100 16gb ", "2xV100-16GB,2xV100-16GB"])
def test_a_specification_may_be_spaced_and_cased(spec):
    """Spaces and case are the writer's."""
    assert [gpu.name for gpu, _ in parse_gpus(spec)] == ["V100-16GB"] * 4


def test_a_group_occupies_every_gpu_in_it():
    """An occupied size is for each GPU of its group, in fractions too."""
    assert [occupied for _, occupied in parse_gpus("3xT4: occupied = 1.5 gib")] == [3 * GIB // 2] * 3


@given(st.integers(0, 24 * GIB - 1))
def test_any_number_of_bytes_can_be_written_down(num_bytes):
    """A size in MiB as Python prints it, with an exponent too, is read back to the byte."""
    assert parse_gpus(f"RTX3090:occupied={num_bytes / MIB}MiB") == ((find_gpu("RTX3090"), num_bytes),)


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from(GPUS), st.integers(0, 4096)), min_size=1, max_size=8))
def test_a_specification_is_read_back_as_written(groups):
    """Any counts, models and sizes come back as the devices that were written down."""
    spec = ",".join(f"{count}x{gpu.name}:occupied={mib}MiB" for count, gpu, mib in groups)
    expected = tuple((gpu, mib * MIB) for count, gpu, mib in groups for _ in range(count))
    assert parse_gpus(spec) == expected


@pytest.mark.parametrize("spec", ["", " ", ",", "T4,", "T4,,T4", "4x", "4", "1.5xT4", "4*T4", ":occupied=1GiB"])
def test_a_malformed_specification_is_answered_with_the_notation(spec):
    """The error repeats what was got and shows the notation and an example."""
    with pytest.raises(DeviceError) as caught:
        parse_gpus(spec)
    assert f"in the devices {spec!r} names no GPU: expected groups of [COUNTx]NAME[:occupied=SIZE]" in str(caught.value)
    assert "4xV100-16GB" in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, MAX_DEVICES + 1, 10**9])
def test_a_count_out_of_range_is_refused(count):
    """No card, or more than any machine holds, is a slip."""
    with pytest.raises(DeviceError, match=rf"asks for {count} GPUs: expected 1 to {MAX_DEVICES}"):
        parse_gpus(f"{count}xT4")


def test_groups_together_are_bounded_too():
    """The bound holds for the sum of all groups."""
    assert len(parse_gpus("32xT4,32xT4")) == MAX_DEVICES
    with pytest.raises(DeviceError, match="asks for 65 devices: expected at most 64"):
        parse_gpus("32xT4,33xT4")


@pytest.mark.parametrize(
    "option", ["", "occupied", "occupied=", "occupied=20GB", "occupied=20", "occupied=-1GiB", "free=1GiB", "x:y"]
)
def test_an_option_that_is_none_is_refused(option):
    """Anything but occupied=SIZE in GiB or MiB is answered with an example for that very GPU."""
    with pytest.raises(DeviceError) as caught:
        parse_gpus(f"2xT4:{option}")
    assert f"{option!r} in '2xT4:{option}' is no option" in str(caught.value)
    assert '"T4:occupied=1.5GiB"' in str(caught.value)


@pytest.mark.parametrize("size", ["16GiB", "16384MiB", "99GiB"])
def test_a_gpu_cannot_be_occupied_wholly(size):
    """A GPU with nothing left could train nothing: the error says how much it has."""
    with pytest.raises(DeviceError, match=r"of the 16\.00 GiB a T4 has: expected less"):
        parse_gpus(f"T4:occupied={size}")


def test_unknown_names_in_a_specification_are_named():
    """A group's unknown model is named as in a single look-up."""
    with pytest.raises(DeviceError, match="GPU 'RTX3091' is not in the catalog"):
        parse_gpus("2xRTX3090,2xRTX3091")
