"""What torch's own tests hold nn.DataParallel to, in our words: on devices, in threads and on virtual GPUs.

Limits, each with a test below:

- parts of outputs that are no tensors of samples: 0-dim floats are averaged, where torch stacks them;
- ``torch.autograd.grad`` with respect to the module's own parameters and buffers needs ``engine="torch"``;
- what is refused raises this library's errors: a `ConfigError` for a module elsewhere, a TypeError for outputs that
  differ;
- ``scatter``, ``gather``, ``replicate`` and ``parallel_apply`` by themselves are torch's, and not called
  (tests/parallel/test_as_data_parallel.py).
"""

from __future__ import annotations

import copy
import gc
import io
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it

from splittune.errors import ConfigError
from splittune.hardware import resolve_hardware
from splittune.parallel import BalancedDataParallel, Link, data_parallel
from splittune.parallel.data_parallel import Engine
from splittune.split import BatchSplit
from tests.parallel.models import CPU, Call, ThreadedLink, assert_same, gradients

Backend = str
BACKENDS: list[tuple[Backend, Engine]] = [
    (backend, engine) for backend in ("cpu", "threads", "virtual") for engine in ("window", "torch")
]


class Setup:
    """One way of running replicas; `wrap` gives each of the devices its share."""

    def __init__(self, backend: Backend, engine: Engine) -> None:
        self.backend, self.engine = backend, engine
        self._hardware = resolve_hardware("3xT4") if backend == "virtual" else None

    def wrap(self, module: nn.Module, shard_sizes: tuple[int, ...] = (2, 3, 3)) -> BalancedDataParallel:
        if self._hardware is None:
            return BalancedDataParallel(
                module=module,
                shard_sizes=shard_sizes,
                device_ids=["cpu"] * len(shard_sizes),
                engine=self.engine,
                link=self.link(len(shard_sizes)),
            )
        split = BatchSplit(global_batch_size=sum(shard_sizes), accumulation_steps=1, shard_sizes=shard_sizes)
        return self._hardware.wrap(module, split, engine=self.engine)

    def link(self, num_devices: int) -> Link | None:
        return ThreadedLink(num_devices) if self.backend == "threads" else None

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._hardware is None:
            yield
            return
        with self._hardware.metered():
            yield


@pytest.fixture(params=BACKENDS, ids=" ".join)
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    """A way of running replicas, with its meter on where it has one."""
    torch.manual_seed(0)
    chosen = Setup(*request.param)
    with chosen.running():
        yield chosen


def same_on_one_device(
    setup: Setup,
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    shard_sizes: tuple[int, ...] = (2, 3, 3),
    tolerance: float = 1e-5,
) -> None:
    """Output, and gradients of parameters and inputs after a backward through its sum of squares, are one device's."""
    kwargs = kwargs or {}
    plain = copy.deepcopy(module)
    found = []
    for each in (plain, setup.wrap(module, shard_sizes)):
        own = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        output = each(*own, **kwargs)
        output.square().sum().backward()
        of_inputs = {str(index): x.grad for index, x in enumerate(own) if isinstance(x, Tensor)}
        found.append((output, gradients(each) | of_inputs))
    (wanted, expected), (got, arrived) = found
    assert torch.allclose(got, wanted, atol=tolerance, rtol=tolerance)
    assert got.dtype == wanted.dtype
    assert_same(arrived, expected, tolerance)


# what a module computes


def test_a_linear_layer_is_trained(setup: Setup) -> None:
    """Output and gradients are one device's; the output is where the first device is."""
    same_on_one_device(setup, nn.Linear(10, 5), (torch.randn(8, 10, requires_grad=True),))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7])
def test_fewer_samples_than_the_devices_share(setup: Setup, num_samples: int) -> None:
    """Small batches leave devices out, and lose nothing."""
    same_on_one_device(setup, nn.Linear(10, 5), (torch.randn(num_samples, 10),))


def test_a_sparse_gradient_stays_sparse(setup: Setup) -> None:
    """An embedding's gradient is the sum of the replicas' sparse ones."""
    module = nn.Embedding(10, 5, sparse=True)
    tokens = torch.randint(10, (8, 5))
    same_on_one_device(setup, module, (tokens,))
    assert module.weight.grad.is_sparse


class Gated(nn.Module):
    def forward(self, left: Tensor, right: Tensor, factor: float, extra: Tensor | None = None) -> Tensor:
        product = left * right
        return factor * (product if extra is None else product + extra)


@pytest.mark.parametrize("shard_sizes", [(2, 3, 3), (8, 0, 0), (0, 4, 4)], ids=str)
@pytest.mark.parametrize("with_extra", [False, True])
def test_several_inputs_and_a_number(setup: Setup, with_extra: bool, shard_sizes: tuple[int, ...]) -> None:
    """Positional and keyword tensors are split alike, a float reaches everyone, a default is left alone."""
    left, right, extra = (torch.randn(8, 5, requires_grad=needs) for needs in (True, True, False))
    kwargs = {"extra": extra} if with_extra else {}
    same_on_one_device(setup, Gated(), (left, right, 0.7), kwargs, shard_sizes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beside", [None, [], {}, ()], ids=repr)
def test_any_dtype_by_keyword_beside_empty_containers(setup: Setup, dtype: torch.dtype, beside: Any) -> None:
    """Keywords alone, nested with something empty that nobody uses, in every floating dtype."""
    layer = nn.Linear(10, 5).to(dtype)
    module = Call(lambda module, batch: module.layer(batch["data"]))
    module.layer = layer
    x = torch.randn(8, 10, dtype=dtype)
    output = setup.wrap(module)(batch={"data": x} if beside is None else {"data": x, "unused": beside})
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    assert output.dtype == dtype
    assert torch.allclose(output, layer(x), atol=tolerance, rtol=tolerance)


def nested(x: Tensor) -> Any:
    return [x, (x.sin(), x.cos(), [x + 1]), x, OrderedDict(a=x, b=[x.sin()])]


def test_outputs_nest_as_they_like(setup: Setup) -> None:
    """Lists, tuples and ordered dictionaries come back as they are, with whole tensors in them."""
    x = torch.randn(8, 2)
    got, wanted = setup.wrap(Call(lambda module, x: nested(x)))(x), nested(x)
    assert [type(part) for part in got] == [type(part) for part in wanted]
    assert [type(part) for part in got[1]] == [Tensor, Tensor, list]
    assert list(got[3]) == ["a", "b"]
    flat = [got[0], *got[1][:2], got[1][2][0], got[2], got[3]["a"], got[3]["b"][0]]
    assert all(
        torch.equal(left, right) for left, right in zip(flat, [x, x.sin(), x.cos(), x + 1, x, x, x.sin()], strict=True)
    )


def test_inputs_nest_as_they_like(setup: Setup) -> None:
    """A tuple within the arguments is taken apart on every device."""
    x = torch.randn(8, 3)
    model = setup.wrap(Call(lambda module, first, pair, last: pair[0]))
    assert torch.equal(model(x.cos(), (x.sin(), x), x.sin()), x.sin())


class Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        output: Tensor = self.rnn(x)[0]
        return output


def test_a_recurrent_layer_flattens_its_weights(setup: Setup) -> None:
    """With and without gradients; a step of a large rate leaves the weights where one device leaves them."""
    module, x = Bidirectional(), torch.ones(8, 4, 6)
    plain, model = copy.deepcopy(module), setup.wrap(module)
    with torch.no_grad():
        assert torch.allclose(model(x[:2]), plain(x[:2]), atol=1e-6)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=10)
        F.mse_loss(each(x), torch.zeros(8, 4, 16)).backward()
        optimizer.step()
    assert_same(dict(module.named_parameters()), dict(plain.named_parameters()))


class Shifted(nn.Module):
    """Scales by a buffer that learns, and adds one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("learns", torch.randn(4, dtype=torch.float64).requires_grad_())
        self.register_buffer("stays", torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.learns + self.stays


def test_a_buffer_may_learn(setup: Setup) -> None:
    """It gets its gradient, as on one device; by torch's engine also where it is asked for by itself."""
    module, x = Shifted(), torch.randn(8, 4, dtype=torch.float64)
    same_on_one_device(setup, module, (x,), tolerance=1e-12)
    module.learns.grad = None
    if (
        setup.engine == "torch" and setup.backend != "virtual"
    ):  # gradcheck writes to the buffer it perturbs, on the host
        model = setup.wrap(module)
        assert torch.autograd.gradcheck(lambda _: model(x), (module.learns,))


LAYOUTS = [[torch.contiguous_format] * 3, [torch.channels_last] * 3]
LAYOUTS.append([torch.channels_last, torch.contiguous_format, torch.channels_last])
DTYPES = [[torch.float32] * 3, [torch.float32, torch.float32, torch.bfloat16]]


class Convolutions(nn.Module):
    def __init__(self, layouts: list[torch.memory_format], dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes
        channels = [(4, 8), (8, 8), (8, 4)]
        self.layers = nn.ModuleList(
            nn.Conv2d(into, out, 2).to(memory_format=layout, dtype=dtype)
            for (into, out), layout, dtype in zip(channels, layouts, dtypes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = layer(x.to(dtype))
        return x.float()


@pytest.mark.parametrize("layouts", LAYOUTS, ids=["contiguous", "channels last", "mixed"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=["float32", "mixed"])
def test_gradients_have_the_layout_of_their_parameters(
    setup: Setup, layouts: list[torch.memory_format], dtypes: list[torch.dtype]
) -> None:
    """The first time, when they are made, and the second, when they are made anew after zero_grad()."""
    module = Convolutions(layouts, dtypes)
    plain, model = copy.deepcopy(module), setup.wrap(module)
    x, target = torch.randn(8, 4, 6, 6), torch.randn(8, 4, 3, 3)
    tolerance = 1e-5 if dtypes[-1] is torch.float32 else 3e-2
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            F.mse_loss(each(x), target).backward()
        for layer, layout in zip(module.layers, layouts, strict=True):
            assert layer.weight.grad.is_contiguous(memory_format=layout)
        assert_same(gradients(module), gradients(plain), tolerance)


def test_a_penalty_on_the_slope_outlives_its_functions(setup: Setup) -> None:
    """The gradient by the inputs is itself differentiated, when nothing but the graph holds what made it."""
    module = nn.Linear(4, 1)
    model = setup.wrap(module, (1, 1, 0))
    x = torch.ones(2, 4, requires_grad=True)
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    slope.mean().backward()
    assert module.weight.grad.tolist() == [[0.25] * 4]
    assert module.bias.grad is None or not module.bias.grad.any()


# how it computes


def test_gradients_are_on_or_off_in_replicas_as_outside(setup: Setup) -> None:
    """Under no_grad() no replica records anything; without it each does."""
    seen: list[bool] = []
    model = setup.wrap(Call(lambda module, x: seen.append(torch.is_grad_enabled()) or x))
    with torch.no_grad():
        model(torch.randn(8, 2))
    model(torch.randn(8, 2))
    assert seen == [False] * 3 + [True] * 3


def test_autocast_in_forward_holds_in_every_replica(setup: Setup) -> None:
    """A forward that is decorated computes in the lower precision, whatever the thread; so does one called inside."""

    class Halved(nn.Linear):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    assert setup.wrap(Halved(8, 8))(torch.randn(8, 8)).dtype is torch.bfloat16
    model = setup.wrap(nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(8, 8)).dtype is torch.bfloat16
    assert model(torch.randn(8, 8)).dtype is torch.float32


def test_zero_grad_in_forward_warns(setup: Setup) -> None:
    """A replica's gradients are not the module's: torch's own warning says so."""

    def forward(module: Call, x: Tensor) -> Tensor:
        module.zero_grad()
        return x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        setup.wrap(Call(forward))(torch.rand(8, 3))
    assert any(re.search(r"zero_grad\(\).*has no effect", str(each.message)) for each in caught)


def test_an_exception_keeps_its_type_and_names_its_replica(setup: Setup) -> None:
    """A KeyError in a replica is a KeyError outside, with the key, and where it was raised."""
    model = setup.wrap(Call(lambda module, x: {}["wonderful"]))
    with pytest.raises(KeyError, match="wonderful") as raised:
        model(torch.randn(8, 2))
    notes = getattr(raised.value, "__notes__", [str(raised.value.__cause__)])
    assert "in replica 0 on device" in " ".join(notes)


def test_a_replica_can_be_saved_from_within(setup: Setup) -> None:
    """Checkpoints that forward itself writes are those of a module."""
    files: list[io.BytesIO] = []

    def forward(module: Call, x: Tensor) -> Tensor:
        file = io.BytesIO()
        torch.save(module.layer, file)
        files.append(file)
        output: Tensor = module.layer(x)
        return output

    module = Call(forward)
    module.layer = nn.Linear(3, 2)
    x = torch.randn(8, 3)
    output = setup.wrap(module)(x)
    assert len(files) == 3
    for file in files:
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        torch.testing.assert_close(loaded(x), output)


def test_replicas_hold_copies_where_they_run(setup: Setup) -> None:
    """Parameters and buffers of each replica are its own, and equal to the module's."""
    found: list[tuple[Tensor, ...]] = []

    def forward(module: Call, x: Tensor) -> Tensor:
        found.append((module.norm.weight.detach(), module.norm.running_mean, module.norm.num_batches_tracked))
        return x * module.scale

    module = Call(forward)
    module.norm = nn.BatchNorm1d(10)
    module.norm.running_mean.normal_()
    setup.wrap(module)(torch.randn(8, 10))
    mean = module.norm.running_mean.tolist()
    assert all(copied.tolist() == mean for _, copied, _ in found)
    for kind in zip(*found, strict=True):
        assert len({tensor.data_ptr() for tensor in kind}) == 3


def test_no_reference_cycle_is_left(setup: Setup) -> None:
    """After a call, and after a backward, the garbage collector finds no tensor to free."""
    model = setup.wrap(nn.Linear(1, 1))
    x = torch.randn(8, 1)
    model(x).sum().backward()  # what is made once and kept is made here
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        model(x)
        model(x).sum().backward()
        gc.collect()
        left = list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not [thing for thing in left if isinstance(thing, Tensor | nn.Module)]
    if setup.backend != "virtual":  # the ledger's dispatch leaves small objects of torch's in cycles
        assert left == []


# what goes out and comes back


def test_rows_go_out_in_order_and_gradients_come_back_to_their_rows(setup: Setup) -> None:
    """A backward through one device's rows reaches these rows of the input and no other."""
    x = torch.randn(8, 4, requires_grad=True)
    output = setup.wrap(Call(lambda module, x: x * module.scale), (2, 6, 0))(x)
    output[:2].backward(torch.full((2, 4), 2.0))
    assert torch.equal(output, x)
    assert torch.equal(x.grad, torch.cat([torch.full((2, 4), 2.0), torch.zeros(6, 4)]))


def test_0_dim_outputs_are_averaged(setup: Setup) -> None:
    """A limit: torch stacks them into one entry a replica. Here a mean stays a mean, and counts are stacked."""
    module = Call(lambda module, x: ((x * module.scale).mean(), torch.tensor(len(x))))
    mean, counts = setup.wrap(module)(torch.arange(8.0))
    mean.backward()
    assert (mean.item(), module.scale.grad.item()) == (3.5, 3.5)
    assert counts.tolist() == [2, 3, 3]


def test_outputs_that_differ_in_their_keys_are_refused(setup: Setup) -> None:
    """A limit in the type only: a TypeError that names what differs, where torch raises a ValueError."""
    model = setup.wrap(Call(lambda module, x: {"a": x} if len(x) == 2 else {"b": x, "a": x}))
    with pytest.raises(TypeError, match="differ"):
        model(torch.randn(8, 2))


def test_slopes_by_the_modules_own_parameters(setup: Setup) -> None:
    """A limit: asked for by themselves they need torch's engine."""
    module, x = nn.Linear(3, 2), torch.randn(8, 3)
    loss = setup.wrap(module)(x).square().sum()
    if setup.engine == "torch":
        got = torch.autograd.grad(loss, list(module.parameters()))
        wanted = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        assert_same(dict(enumerate(got)), dict(enumerate(wanted)))
    else:
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss, list(module.parameters()))


# the function


@pytest.mark.parametrize("threaded", [False, True], ids=["one thread", "threads"])
@pytest.mark.parametrize("device_ids", [["cpu"], ["cpu", "cpu"], (CPU, "cpu:0"), [CPU] * 3], ids=str)
def test_the_function_takes_devices_of_any_form(device_ids: Any, threaded: bool) -> None:
    """Names and devices, in a list or a tuple, with and without a place for the output and keywords."""
    module = Gated()
    left, right, extra = (torch.randn(8, 5, requires_grad=True) for _ in range(3))
    link = ThreadedLink(len(device_ids)) if threaded else None
    for output_device in (None, CPU, "cpu"):
        got = data_parallel(
            module, (left, right, 0.7), device_ids, output_device, module_kwargs={"extra": extra}, link=link
        )
        torch.testing.assert_close(got, module(left, right, 0.7, extra))
    torch.testing.assert_close(
        data_parallel(module, (left, right, 0.7), device_ids, link=link), module(left, right, 0.7)
    )


# where the module is


def elsewhere() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (elsewhere, "weight"),
        (lambda: nn.Sequential(elsewhere()), "0.weight"),
        (lambda: nn.Sequential(nn.Linear(2, 2), elsewhere()), "1.weight"),
        (lambda: nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, device="meta", affine=False)), "1.running_mean"),
    ],
    ids=["itself", "inside", "a part", "a buffer"],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda module, x: BalancedDataParallel(1, module, ["cpu"] * 2)(x),
        lambda module, x: data_parallel(module, x, ["cpu"] * 2),
    ],
    ids=["wrapper", "function"],
)
def test_a_module_elsewhere_is_refused_when_it_is_called(
    build: Callable[[], nn.Module], name: str, call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """All of it must be on the first device: what is not is named, with where it is."""
    with pytest.raises(ConfigError, match=f"^{name} of the module is on meta: expected cpu"):
        call(build(), torch.randn(4, 2))


def test_a_wrapper_may_be_moved_after_it_was_made() -> None:
    """``.to()`` of the wrapper brings the module to where it is expected."""
    model = BalancedDataParallel(1, elsewhere(), ["cpu"] * 2).to_empty(device="cpu")
    assert model(torch.randn(4, 2)).shape == (4, 2)


def test_lazy_modules_are_refused(setup: Setup) -> None:
    """A module without its shapes has nothing to copy: torch's own advice is passed on."""
    with pytest.raises((RuntimeError, ValueError), match="initialize"):
        setup.wrap(nn.LazyLinear(2))(torch.zeros(8, 3))
