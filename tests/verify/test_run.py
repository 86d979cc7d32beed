"""verify: the user's own job under the emitted config, its memory beside the plan, and everything as it was found."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splittune import ConfigError, DeviceError, TrainingTask, Verification, verify
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.hardware import VirtualHardware
from splittune.units import MIB
from tests.faults.moments import count_calls
from tests.faults.trapped import DEVICES, FAULTS, Job, Trap, try_fault
from tests.training.state import state_of
from tests.verify.jobs import AMPLE, SMALL, Evaluated, Reader, Texts, config_for, left_free, lengths_trained, task_of

# what is run


def test_the_longest_batches_are_trained_first() -> None:
    """The three longest of the loader's first batches come first, then the loader from its start, round and round."""
    model = Reader()
    result = verify(config_for((8,), devices="1xT400-4GB"), task_of(model, Texts(2, 9, 3, 7, 5, 8)), num_steps=11)
    assert lengths_trained(model) == [9, 8, 7, 2, 9, 3, 7, 5, 8, 2, 9]
    assert result.is_verified
    assert len(result.losses) == 11


def test_a_late_long_batch_runs_out_of_memory_at_the_first_step() -> None:
    """The text that a run of days would meet late, and end with, is met at once; it is named with its device."""
    lengths = [4] * 30
    config = config_for((4, 4), devices=left_free(40))
    assert verify(config, task_of(Reader(), Texts(*lengths)), num_steps=30).is_verified
    lengths[27] = 20_000
    result = verify(config, task_of(Reader(), Texts(*lengths)), num_steps=30)
    assert not result.is_verified
    assert result.lack is not None
    assert (result.lack.where, result.lack.device) == ("step 1", 0)
    assert result.losses == ()
    assert result.verdicts[0] == "out of memory at step 1"
    assert result.summary.startswith("Not verified: out of memory at step 1, on GPU 0. Tune again with ")


def test_evaluations_come_after_the_longest_and_four_times_over_the_run() -> None:
    """Evaluation runs in eval mode, without gradients, in the tuned micro-batches; then training goes on as before."""
    model = Reader()
    result = verify(config_for((2,), 4, devices="1xT400-4GB"), task_of(model, Texts(3, 2, 1)), num_steps=8)
    steps = [(trains, has_gradients) for _, _, trains, has_gradients in model.seen][::4]
    trained, evaluated = (True, True), (False, False)
    after = [2, 3, 4, 6, 8]
    assert steps == [kind for step in range(1, 9) for kind in ([trained, evaluated] if step in after else [trained])]
    assert result.num_evaluations == len(after)
    assert model.frozen.training is False


@pytest.mark.parametrize(
    ("devices", "shards", "k"), [("1xT400-4GB", (6,), 1), (AMPLE, (1, 2), 2), ("3xT400-4GB", (0, 2, 1), 2)]
)
@pytest.mark.parametrize("placement", ["output", "replica"])
def test_it_trains_what_a_plain_loop_trains(devices: str, shards: tuple[int, ...], k: int, placement: str) -> None:
    """Under any split and loss placement the losses are those of the whole batch on one device, a
    short last one too."""
    torch.manual_seed(0)
    batches = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (6, 6, 4)]
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for x, y in [*batches, *batches]:
        optimizer.zero_grad()
        loss = functional.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    task = task_of(model, batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    result = verify(config_for(shards, k, devices=devices, size=6, loss_placement=placement), task, num_steps=6)
    assert result.losses == pytest.approx(losses, rel=1e-4)
    assert result.is_verified


def test_batches_are_resized_where_the_task_says_another_size() -> None:
    """A task whose global batch is not its loader's is trained in its own size, a short batch in
    proportion; it is said."""
    model = Reader()
    task = task_of(model, Texts(3, 2, last=4), global_batch_size=20)
    result = verify(config_for((20,), devices="1xT400-4GB"), task, num_steps=2)
    assert [size for _, size, trains, _ in model.seen if trains] == [20, 10]
    assert "The loader gives batches of 8, and the global batch size is 20" in result.notes[0]


def test_a_step_of_the_users_own_is_trained_and_evaluated() -> None:
    """step_fn trains, and gives the loss of evaluations."""
    calls: list[bool] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return functional.mse_loss(model(batch[0]), batch[1])

    task = task_of(Reader(), Texts(2, 2), loss_fn=None, step_fn=step)
    result = verify(config_for((4, 4)), task, num_steps=2)
    assert calls == [True, False, False, True, False, False]
    assert result.num_evaluations == 2


def test_a_step_that_cannot_be_evaluated_is_a_note() -> None:
    """A step_fn that needs gradients trains on, and that evaluation was not verified is said once."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 1), nn.Tanh(), nn.Flatten(0))
    task = task_of(model, Texts(2, 2), loss_fn=None, step_fn=step)
    result = verify(config_for((8,), devices="1xT400-4GB"), task, num_steps=4, measure_eval_batch_size=True)
    assert result.is_verified
    assert (len(result.losses), result.num_evaluations) == (4, 0)
    first, second = result.notes
    assert first.startswith("Evaluation was not verified: step_fn cannot be computed in eval() under torch.no_grad()")
    assert second == "No evaluation batch size was measured: nothing could be evaluated."


def test_an_output_of_evaluation_without_a_loss_is_a_note() -> None:
    """A model that returns its loss in training alone, as detectors do, is evaluated without; its
    own errors pass through."""

    class Detector(nn.Linear):
        error: Exception | None = None

        def forward(self, x: Tensor, targets: Tensor) -> Any:
            if self.error is not None and not self.training:
                raise self.error
            output = super().forward(x)
            return functional.mse_loss(output, targets) if self.training else {"boxes": output}

    model, batches = Detector(4, 1), [((x, y), torch.zeros(4)) for x, y in SMALL]
    result = verify(config_for((2, 2)), task_of(model, batches, loss_fn=None), num_steps=2)
    assert result.is_verified
    assert result.notes[0].startswith("Evaluation was not verified: the job's loss cannot be computed in eval()")
    model.error = ZeroDivisionError("a bug of the user's own")
    with pytest.raises(ZeroDivisionError):
        verify(config_for((2, 2)), task_of(model, batches, loss_fn=None), num_steps=2)


def test_a_loss_that_is_not_finite_is_a_note() -> None:
    """A run that diverges is measured all the same; the first such step is named."""
    task = task_of(
        nn.Linear(1, 1), [(torch.ones(2, 1), torch.zeros(2, 1))], optimizer=lambda p: torch.optim.SGD(p, lr=1e30)
    )
    result = verify(config_for((1, 1)), task, num_steps=3)
    assert result.is_verified
    assert result.notes[0].startswith("The loss was not finite at step 2: ")


# memory beside the plan


def test_a_run_as_planned() -> None:
    """Where no device takes more than planned every verdict says so, and evaluation's peak is no peak of its own."""
    config = config_for((2, 2))
    free = verify(config, task_of(Evaluated(0), SMALL), num_steps=2)
    assert [verdict.endswith("GiB free") for verdict in free.verdicts] == [True, True]
    config = replace(config, planned_peak_reserved_bytes=tuple(m.peak_reserved_bytes for m in free.memory))
    result = verify(config, task_of(Evaluated(0), SMALL), num_steps=2)
    assert result.verdicts == ("as planned", "as planned")
    assert result.evaluation_peak_reserved_bytes == (None, None)
    assert result.training_peak_reserved_bytes == config.planned_peak_reserved_bytes
    assert result.suggested_min_headroom_bytes is None
    assert result.summary == "Verified: 2 steps and 2 evaluations ran, and every device kept its headroom."


def test_the_peak_of_an_evaluation_counts() -> None:
    """An evaluation that takes more than training is told apart from it, and can cost the verification."""
    plan: dict[str, Any] = {"devices": left_free(64), "planned_peak_reserved_bytes": (4 * MIB, 4 * MIB)}
    result = verify(config_for((2, 2), **plan), task_of(Evaluated(40), SMALL), num_steps=2)
    assert result.is_verified
    assert result.training_peak_reserved_bytes[0] < 10 * MIB
    peak = result.evaluation_peak_reserved_bytes[0]
    assert peak is not None
    assert peak > 40 * MIB
    assert (
        result.verdicts[0]
        == f"{(peak - 4 * MIB) / MIB:.1f} MiB more than planned, still {64 - peak / MIB:.1f} MiB free"
    )
    lacking = verify(
        config_for((2, 2), **plan, min_headroom_bytes=(30 * MIB, 0)), task_of(Evaluated(40), SMALL), num_steps=2
    )
    assert not lacking.is_verified
    assert lacking.lack is None
    assert lacking.verdicts[0].startswith("too little headroom: ")
    assert lacking.verdicts[1].endswith("free")
    assert lacking.suggested_min_headroom_bytes == 30 * MIB + peak - 4 * MIB
    assert "GPU 0 lacks " in lacking.summary


def test_an_evaluation_may_run_out_of_memory() -> None:
    """An evaluation that does not fit says after which step."""
    result = verify(config_for((2, 2), devices=left_free(64)), task_of(Evaluated(80), SMALL), num_steps=2)
    assert result.lack is not None
    assert (result.lack.where, result.lack.device) == ("the evaluation after step 1", 0)
    assert len(result.losses) == 1


# as found


def verify_faulty(job: Job, hardware: VirtualHardware, **options: Any) -> str:
    """How a run of the job with a fault ended, in the words of the table of faults."""
    task = TrainingTask(job.model, job.loader, loss_fn=job.loss_fn, optimizer=job.optimizer)
    config = config_for((2, 2, 3), 2, devices=DEVICES)
    result = verify(config, task, hardware=hardware, num_steps=4, **options)
    return "verified" if result.lack is None else f"out of memory at {result.lack.where}"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("place", "visit", "where"),
    [
        ("forward", 1, "step 1"),
        ("forward", 20, "the evaluation after step 2"),
        ("forward", 13, "step 2"),
        ("loss_fn", 2, "step 1"),
        ("backward", 5, "step 1"),
        ("backward", 10, "step 2"),
        ("optimizer", 2, "step 2"),
        ("loader", 3, ""),
        ("loader", 6, "step 4"),
    ],
)
def test_the_job_is_as_it_was_found_whatever_goes_wrong(
    fault: str, place: str, visit: int, where: str, owned: list[Any]
) -> None:
    """The very exception passes through, only memory that runs out is a result; then all is as it was, to the bit."""
    trap = Trap(place, visit, FAULTS[fault])
    expected = f"out of memory at {where}" if fault == "OutOfMemoryError" and where else fault
    row = try_fault(trap, fault, expected, owned, verify_faulty)
    assert row.has_passed, row


@pytest.mark.parametrize("options", [{}, {"measure_eval_batch_size": True}])
def test_the_job_is_as_it_was_found_after_a_run(options: dict[str, Any], owned: list[Any]) -> None:
    """Weights, gradients, optimizer, generators and modes are bit-identical, and the devices are empty."""
    row = try_fault(Trap(), "", "verified", owned, lambda job, hardware: verify_faulty(job, hardware, **options))
    assert row.has_passed, row


def test_a_cuda_error_that_sticks_passes_through() -> None:
    """It is no lack of memory, even if it says so as well; what is on the host is put back."""
    job = Job(Trap("forward", 8, lambda: RuntimeError("CUDA error: device-side assert triggered")))
    found = job.fingerprint()
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        verify_faulty(job, resolve_hardware(DEVICES))  # type: ignore[arg-type]
    assert caught.value is job.trap.raised
    assert job.fingerprint() == found


@pytest.mark.parametrize("free_bytes", [(0, 4096 * MIB, 0), (4096 * MIB,) * 3, None])
@pytest.mark.parametrize("is_evaluated", [False, True])
def test_a_handle_that_cannot_be_created_is_a_lack_of_memory_on_a_full_card(
    is_evaluated: bool, free_bytes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a trial: with a card nearly full it is the result; else it is the job's own, in evaluation a note."""
    monkeypatch.setattr(VirtualHardware, "free_bytes", lambda _self: free_bytes)

    def step(model: nn.Module, batch: Any) -> Tensor:
        if model.training is not is_evaluated:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
        return functional.mse_loss(model(batch[0]), batch[1])

    def result() -> Verification:
        return verify(config_for((4, 4)), task_of(Reader(), Texts(2, 2), loss_fn=None, step_fn=step), num_steps=2)

    if free_bytes is not None and min(free_bytes) == 0:
        lack = result().lack
        assert lack is not None
        assert lack.where == ("the evaluation after step 1" if is_evaluated else "step 1")
        assert lack.message == "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"
    elif is_evaluated:
        assert "CUDNN_STATUS_NOT_INITIALIZED" in result().notes[0]
    else:
        with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_INITIALIZED"):
            result()


# one that arrives in a weakref's callback
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_leaves_the_job_as_it_was_found() -> None:
    """Wherever Ctrl-C arrives it is raised, the job is bit-identical and the devices are empty."""

    def run(job: Job) -> None:
        verify_faulty(job, resolve_hardware(DEVICES), measure_eval_batch_size=True)  # type: ignore[arg-type]

    job = Job(Trap())
    num_calls, draw = count_calls(lambda: run(job)), random.Random(17)
    for moment in [draw.randrange(num_calls) for _ in range(5)]:
        job = Job(Trap())
        found = job.fingerprint()
        with pytest.raises(KeyboardInterrupt):
            count_calls(lambda job=job: run(job), moment)  # type: ignore[misc]
        assert job.fingerprint() == found, moment


def test_a_loader_with_a_generator_is_as_it_was_found() -> None:
    """A shuffling DataLoader goes on in the order that it would have had."""
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
    order = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=order)
    model = nn.Linear(4, 1).eval()
    before = state_of(model, None, loader)
    assert verify(config_for((4, 4)), task_of(model, loader), num_steps=7).is_verified
    assert state_of(model, None, loader) == before


# what does not fit together


@pytest.mark.parametrize(
    ("fields", "options", "match"),
    [
        ({}, {"num_steps": 0}, r"num_steps is 0: expected an integer of at least 1"),
        ({}, {"devices": "3xT400-4GB"}, r"number of devices: got 3 .*expected 2"),
        ({}, {"devices": AMPLE, "hardware": object()}, r"hardware= as well"),
        (
            {"size": 10, "shards": (5, 5)},
            {},
            r"tuned for batches of 10 samples .*the loader gives batches of 4.*tune this job",
        ),
        ({"loss_placement": "replica"}, {"step_fn": True}, r"the loss cannot be placed in the replicas"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], options: dict[str, Any], match: str) -> None:
    """Another batch size, another number of devices, a loss that cannot be where it was: refused, with what to do."""
    step_fn = (lambda model, batch: model(batch[0]).mean()) if options.pop("step_fn", False) else None
    task = task_of(nn.Linear(4, 1), SMALL, **({"loss_fn": None, "step_fn": step_fn} if step_fn else {}))
    with pytest.raises(ConfigError, match=match):
        verify(config_for(**{"shards": (2, 2), **fields}), task, **options)


def test_a_task_of_another_global_batch_size_is_refused() -> None:
    """The task's word counts before the loader's."""
    with pytest.raises(ConfigError, match=r"the task's global_batch_size is 6: expected 4"):
        verify(config_for((2, 2)), task_of(nn.Linear(4, 1), SMALL, global_batch_size=6))


def test_devices_that_are_not_there_are_refused() -> None:
    """A config of real cards is not verified without them."""
    config = replace(config_for((2, 2)), virtual_spec=None, is_modelled=False)
    with pytest.raises(DeviceError, match="cannot be had here"):
        verify(config, task_of(nn.Linear(4, 1), SMALL))


def test_other_devices_than_the_tuned_ones_are_a_note() -> None:
    """What `wrap` warns of is said in the result, once, and is no Python warning; the result names the devices used."""
    result = verify(
        config_for((2, 2)),
        task_of(nn.Linear(4, 1), SMALL),
        devices="2xRTX3090",
        num_steps=1,
        measure_eval_batch_size=True,
    )
    assert [device.name for device in result.devices] == ["RTX3090"] * 2
    assert sum("tuned on other devices than these" in note for note in result.notes) == 1


def test_a_loader_that_cannot_be_read_again_is_refused() -> None:
    """An iterator's batches would be lost to training; and a loader that is empty the second time ends the run."""
    with pytest.raises(ConfigError, match="an iterator"):
        verify(config_for((2, 2)), task_of(nn.Linear(4, 1), iter(SMALL)))

    class Twice:
        num_rounds = 0

        def __iter__(self) -> Iterator[Any]:
            self.num_rounds += 1
            return iter(SMALL if self.num_rounds <= 2 else [])

    with pytest.raises(ConfigError, match="gave no batch when it was iterated over again"):
        verify(config_for((2, 2)), task_of(nn.Linear(4, 1), Twice()), num_steps=5)


def test_progress_is_told() -> None:
    """A callback hears of every step with its loss, and of what goes on besides."""

    class Listener:
        def __init__(self) -> None:
            self.said: list[Any] = []

        def on_activity(self, what: str) -> None:
            self.said.append(what)

        def on_step(self, step: int, num_steps: int, loss: float) -> None:
            self.said.append((step, num_steps, loss))

    callback = Listener()
    result = verify(config_for((2, 2)), task_of(nn.Linear(4, 1), SMALL), num_steps=3, callback=callback)
    expected = [(step, 3, loss) for step, loss in enumerate(result.losses, 1)]
    assert callback.said == ["reading up to 3 batches, for the longest", *expected]
