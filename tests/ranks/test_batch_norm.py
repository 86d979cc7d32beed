"""BatchNorm over ranks with uneven shares is one device's, in real processes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from splittune.errors import ConfigError
from splittune.ranks.batch_norm import SynchronisedBatchNorm, synchronised_batch_norm
from tests.parallel.models import assert_same
from tests.parallel.normed import CHECKPOINTED, NORMS, images, make, one_device
from tests.ranks.norms import (
    NormCase,
    Own,
    by_config,
    evaluated,
    expected_of,
    in_half_precision,
    of_nothing,
    of_one_value,
    on_ranks,
    refused,
    unsynchronised,
)
from tests.ranks.pool import Pool

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def check(pool: Pool, case: NormCase) -> None:
    expected = expected_of(case)
    answers = pool.run(on_ranks, case, num_ranks=len(case.sizes[0]))
    outputs, inputs = torch.empty_like(expected["outputs"]), torch.zeros_like(expected["gradient of the inputs"])
    for answer in answers:
        own = answer.pop("own")
        outputs[own] = answer.pop("outputs")
        inputs += answer.pop("gradient of the inputs")  # a stand-in's is 0
        assert_same(answer, {name: expected[name] for name in answer}, TOLERANCE[case.dtype])
    got = {"outputs": outputs, "gradient of the inputs": inputs}
    assert_same(got, {name: expected[name] for name in got}, TOLERANCE[case.dtype])
    assert {*answers[0], *got} == set(expected)


MODELS = sorted([*NORMS, *CHECKPOINTED])


@st.composite
def sizes(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Samples of each rank in each of a step's micro-batches: any, two at least in each."""
    ranks = draw(st.integers(1, 4))
    table = st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks).filter(lambda each: sum(each) > 1).map(tuple)
    return tuple(draw(st.lists(table, min_size=1, max_size=3)))


@settings(max_examples=60)
@given(name=st.sampled_from(MODELS), sizes=sizes())
def test_a_step_is_that_of_one_device(pool: Pool, name: str, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Any shares, none included: outputs, gradients of parameters and inputs, running statistics on every rank."""
    check(pool, NormCase(name=name, sizes=sizes))


@settings(max_examples=30)
@given(name=st.sampled_from(MODELS), sizes=sizes(), names_model=st.booleans())
def test_so_is_the_loop_of_a_config(
    pool: Pool, name: str, sizes: tuple[tuple[int, ...], ...], names_model: bool
) -> None:
    """`config.wrap(model, sync_batch_norm=True)` and `config.micro_batches`, which knows the stand-ins."""
    case = NormCase(name=name, sizes=sizes)
    expected = expected_of(case)
    for answer in pool.run(by_config, case, names_model, num_ranks=len(sizes[0])):
        assert_same(answer, {key: expected[key] for key in answer}, 1e-12)
        assert {*answer, "outputs", "gradient of the inputs"} == set(expected)


def test_a_stand_in_is_nothing_to_batch_norm_that_is_not_synchronised(pool: Pool) -> None:
    """Of its one sample there is no variance, and no statistics either: where it runs, the running ones stand."""
    answers = pool.run(unsynchronised)
    for rank, (mine, expected, running_mean, trains) in enumerate(answers):
        assert_same(mine, expected, 1e-12)
        assert (bool(running_mean.any()), trains) == (rank == 0, True)


def test_a_layer_that_cannot_be_synchronised_is_refused_on_every_rank(pool: Pool) -> None:
    """By name, before anything is changed."""
    for said in pool.run(refused):
        assert "layer 0 is a Own: expected torch's BatchNorm1d" in said


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("step", [((10, 0),), ((7, 3), (0, 10), (1, 1)), ((1, 1, 1, 1), (6, 0, 0, 1))], ids=str)
def test_in_float32_and_channels_last_too(
    pool: Pool, step: tuple[tuple[int, ...], ...], memory_format: torch.memory_format
) -> None:
    """To 1e-5; and with gradients that are views of the buckets."""
    options = (("gradient_as_bucket_view", True),)
    check(
        pool,
        NormCase(name="two in a row", sizes=step, dtype=torch.float32, memory_format=memory_format, options=options),
    )


def test_in_half_precision_statistics_are_in_float32(pool: Pool) -> None:
    """Running statistics of bfloat16 maps are one device's to float32's accuracy."""
    for mine, expected in pool.run(in_half_precision, (1, 4, 7, 2)):
        assert_same(mine, expected, 1e-6)


def test_a_single_value_in_all_is_refused_on_every_rank(pool: Pool) -> None:
    """Stand-ins are no values; nobody is left waiting."""
    for said in pool.run(of_one_value):
        assert said == "Expected more than 1 value per channel when training, got 1 in all ranks together"


def test_evaluation_waits_for_nobody(pool: Pool) -> None:
    """One rank may evaluate by itself."""
    assert all(pool.run(evaluated))


def test_a_rank_with_an_empty_batch_takes_part(pool: Pool) -> None:
    """Where a model does with no sample at all, its count is 0."""
    for mean in pool.run(of_nothing):
        assert mean.tolist() == [3.0, 3.0]


def full_of_things() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(2, 4),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.BatchNorm2d(4).eval(), nn.SyncBatchNorm(4)),
        nn.BatchNorm3d(3),
    )
    model[1].weight.requires_grad_(False)
    model[3] = model[2][0]  # shared
    return model


def test_the_model_is_what_it_was() -> None:
    """The same objects with the same parameters, buffers, names, modes and hooks; BatchNorm by type as well."""
    model, seen = full_of_things(), []
    model[1].register_forward_hook(lambda *_: seen.append("called"))
    modules = {name: id(each) for name, each in model.named_modules()}
    tensors = {name: (id(each), each.requires_grad) for name, each in model.state_dict(keep_vars=True).items()}
    modes = [each.training for each in model.modules()]
    assert synchronised_batch_norm(model) is model
    assert {name: id(each) for name, each in model.named_modules()} == modules
    now = model.state_dict(keep_vars=True)
    assert {name: (id(each), each.requires_grad) for name, each in now.items()} == tensors
    assert [each.training for each in model.modules()] == modes
    assert isinstance(model[1], nn.BatchNorm1d)
    assert isinstance(model[2][0], nn.BatchNorm2d)
    assert isinstance(model[2][1], SynchronisedBatchNorm)
    model[1](torch.randn(3, 4))
    assert seen == ["called"]
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        model[1](torch.randn(3, 4, 1, 1))
    with pytest.raises(ValueError, match="at least 2D"):
        model[2][1](torch.randn(3))


def test_it_may_be_done_twice_copied_and_pickled() -> None:
    """Copies are synchronised too; a second time changes nothing."""
    model = synchronised_batch_norm(synchronised_batch_norm(full_of_things()))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(map(type, again.modules())) == list(map(type, model.modules()))
        assert_same(*({k: v.double() for k, v in each.state_dict().items()} for each in (again, model)))


def test_without_ranks_it_is_batch_norm() -> None:
    """No process group: what one device does, in training and evaluation."""
    batch = images(6)
    model = make("2d")
    expected = one_device(copy.deepcopy(model), batch, [4, 2])
    assert_same(one_device(synchronised_batch_norm(model), batch, [4, 2]), expected, 1e-15)


def test_a_layer_with_a_forward_of_its_own_is_refused_by_name() -> None:
    """Before any other layer is changed."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(Own(2)))
    with pytest.raises(ConfigError, match=r"layer 1\.0 is a Own: expected torch's"):
        synchronised_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm2d
