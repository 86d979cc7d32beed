"""Exports, each loaded by the tool it is for: the batch that the tool computes is the config's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import splittune
from splittune import BatchSplit, ConfigError, TuneResult
from splittune.exports import TOOLS, TriedSplit, best_even, export_saved, is_even
from splittune.hardware.base import Device
from tests.ranks.cases import config_of
from tests.report import results

EVEN_TOOLS = sorted(set(TOOLS) - {"torchrun"})
UNEVEN = results.SPLIT  # 64 = 2 x (8 + 24), 128 samples/s
EVEN = results.EVEN  # 64 = 4 x (8 + 8), 80 samples/s


def tuned(*even: BatchSplit, **fields: Any) -> TuneResult:
    """The winner, searched and confirmed, beside even splits that were searched."""
    searched = [results.ran(UNEVEN, 0.5), *(results.ran(split, 0.8) for split in even)]
    trials = [results.trial(each, number) for number, each in enumerate(searched)]
    trials.append(results.trial(results.ran(UNEVEN, 0.5), len(trials), "confirm"))
    return results.result(trials=tuple(trials), **fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tuned(EVEN).save(tmp_path / "split")


def module_of(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "export.py", "exec"), names)
    return names


def options_of(script: str) -> dict[str, str]:
    """What follows ``--`` in a shell script."""
    return dict(re.findall(r"--([\w.]+) (\d+)", script))


def sizes_in(to: str, text: str) -> tuple[int, int]:
    """Samples of a device and accumulation steps, as the export's own keys have them."""
    if to == "deepspeed":
        data = json.loads(text)
        return data["train_micro_batch_size_per_gpu"], data["gradient_accumulation_steps"]
    if to == "transformers":
        keys = dict(re.findall(r"^(\w+): (\d+)$", text, flags=re.MULTILINE))
        return int(keys["per_device_train_batch_size"]), int(keys["gradient_accumulation_steps"])
    if to == "torchtitan":
        options = options_of(text)
        share, batch = int(options["training.local_batch_size"]), int(options["training.global_batch_size"])
        return share, batch // (share * int(options["parallelism.data_parallel_replicate_degree"]))
    names = module_of(text)
    if to == "lightning":
        return names["LOADER"]["batch_size"], names["TRAINER"]["accumulate_grad_batches"]
    if to == "accelerate":
        return names["LOADER"]["batch_size"], names["ACCELERATOR"]["gradient_accumulation_steps"]
    share = names["TRAINER"]["device_train_microbatch_size"]
    return share, names["LOADER"]["batch_size"] // share


@pytest.mark.parametrize("to", EVEN_TOOLS)
def test_an_uneven_winner_becomes_the_even_split_that_was_measured(folder: Path, to: str) -> None:
    """With what it costs, the figures named modelled, and the release that it was tried with, in the text itself."""
    made = export_saved(folder, to)
    assert made.split == EVEN
    assert sizes_in(to, made.text) == (8, 4)
    flat = " ".join(made.text.replace("#", " ").split())
    assert "80.0 samples/s, 37.5 % fewer than the 128.0 of the winner, 64 = 2 x (8 + 24) (modelled, in the" in flat
    assert f"Tried with {TOOLS[to].distribution} {TOOLS[to].tried_with}" in flat


@pytest.mark.parametrize("to", EVEN_TOOLS)
def test_an_even_winner_needs_no_trials(tmp_path: Path, to: str) -> None:
    """It is exported itself, from a config alone, for ranks as well; nothing is said of another split."""
    config = config_of(2, split=EVEN)
    config.save(tmp_path / "one.json")
    made = export_saved(tmp_path / "one.json", to)
    assert (made.split, sizes_in(to, made.text)) == (EVEN, (8, 4))
    assert "fewer" not in made.text
    assert made.text == config.export(to, config_path=(tmp_path / "one.json").as_posix()).text


@pytest.mark.parametrize("to", EVEN_TOOLS)
def test_without_a_measured_even_split_there_is_no_export(tmp_path: Path, to: str) -> None:
    """It says which even splits there would be, and that torchrun takes any shares."""
    folder = tuned().save(tmp_path)
    with pytest.raises(ConfigError, match=r"32 x 1 x 2 \(not tried\).*16 x 2 x 2 \(not tried\).*torchrun"):
        export_saved(folder, to)


def test_what_ran_out_of_memory_is_no_even_split_to_export(tmp_path: Path) -> None:
    """The message says how it ended."""
    result = tuned()
    failed = results.trial(replace(results.FAILED, split=EVEN), 7)
    folder = replace(result, trials=(*result.trials, failed)).save(tmp_path)
    with pytest.raises(ConfigError, match=r"8 x 4 x 2 \(out_of_memory\)"):
        export_saved(folder, "deepspeed")


def test_a_batch_that_no_even_split_makes_is_never_rounded() -> None:
    """65 samples on 2 devices: the nearest batch sizes are named."""
    config = config_of(2, split=BatchSplit.even(global_batch_size=65, accumulation_steps=1, num_devices=2))
    with pytest.raises(ConfigError, match=r"65 / 2 leaves 1.* nearest .* even split is 64 or 66: tune for that"):
        config.export("deepspeed")
    few = config_of(4, split=BatchSplit(global_batch_size=2, accumulation_steps=1, shard_sizes=(2, 0, 0, 0)))
    with pytest.raises(ConfigError, match=r"2 / 4 leaves 2.* nearest that has an even split is 4: tune for that"):
        few.export("deepspeed")


@given(data=st.data())
def test_the_even_split_was_measured_and_its_product_is_the_batch(data: st.DataObject) -> None:
    """For any trials: one of them, which ran, and no faster one of its kind was passed over."""
    num_devices = data.draw(st.integers(1, 4))
    batch = data.draw(st.integers(num_devices, 24))
    splits = st.builds(
        lambda k: BatchSplit.even(global_batch_size=batch, accumulation_steps=k, num_devices=num_devices),
        st.integers(1, batch),
    )
    rate = st.floats(1, 100)
    tried = st.builds(
        TriedSplit,
        split=splits,
        kind=st.sampled_from(["search", "confirm"]),
        outcome=st.sampled_from(["ok", "out_of_memory"]),
        throughput=st.none() | rate,
    )
    trials = data.draw(st.lists(tried, max_size=8))
    config = config_of(num_devices, split=data.draw(splits))
    try:
        found = best_even(config, trials).split
    except ConfigError:
        assert not is_even(config.split)
        assert not [t for t in trials if is_even(t.split) and t.outcome == "ok" and t.throughput]
        return
    assert found.shard_sizes[0] * found.accumulation_steps * num_devices == batch
    assert len(set(found.shard_sizes)) == 1
    if found != config.split or not is_even(config.split):
        ran = [t for t in trials if is_even(t.split) and t.outcome == "ok" and t.throughput is not None]
        assert max(t.throughput or 0 for t in ran if t.split == found) == max(t.throughput or 0 for t in ran)


def test_transformers_reads_its_export(folder: Path, tmp_path: Path) -> None:
    """By HfArgumentParser; per device x accumulation x devices is the batch."""
    transformers = pytest.importorskip("transformers")
    path = export_saved(folder, "transformers").save(tmp_path / "training_args.yaml")
    path.write_text(path.read_text() + f"output_dir: {tmp_path}\nuse_cpu: true\n")
    (args,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_yaml_file(path)
    assert args.train_batch_size * args.gradient_accumulation_steps * 2 == 64
    assert args.auto_find_batch_size is False
    assert TOOLS["transformers"].installed is not None


@pytest.mark.filterwarnings("default")
def test_deepspeed_reads_its_export(folder: Path, tmp_path: Path) -> None:
    """Its own config class checks the product, here for the one process that it finds."""
    runtime = pytest.importorskip(
        "deepspeed.runtime.config", reason="deepspeed is not installed: pip install deepspeed"
    )
    made = export_saved(folder, "deepspeed")
    with pytest.raises(AssertionError, match="64 != 8 \\* 4 \\* 1"):
        runtime.DeepSpeedConfig(str(made.save(tmp_path / "ds.json")))
    one = config_of(1, split=BatchSplit(global_batch_size=32, accumulation_steps=4, shard_sizes=(8,)))
    read = runtime.DeepSpeedConfig(str(one.export("deepspeed").save(tmp_path / "one.json")))
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (32, 4)


def test_lightning_takes_its_export(folder: Path) -> None:
    """Trainer and loader: batch x devices x accumulation is the global batch."""
    lightning = pytest.importorskip("pytorch_lightning")
    names = module_of(export_saved(folder, "lightning").text)
    trainer = lightning.Trainer(**names["TRAINER"] | {"accelerator": "cpu"}, logger=False, barebones=True)
    loader = DataLoader(TensorDataset(torch.zeros(64, 1)), **names["LOADER"])
    assert trainer.world_size * trainer.accumulate_grad_batches * loader.batch_size == 64


def test_accelerate_takes_its_export(folder: Path) -> None:
    """The Accelerator that is made of it accumulates so often, over its own loader."""
    accelerate = pytest.importorskip("accelerate")
    names = module_of(export_saved(folder, "accelerate").text)
    accelerator = accelerate.Accelerator(**names["ACCELERATOR"], cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(64, 1)), **names["LOADER"]))
    assert loader.total_batch_size * accelerator.gradient_accumulation_steps * 2 == 64


@pytest.mark.filterwarnings("default")
def test_torchtitan_reads_its_export(folder: Path) -> None:
    """Its own config classes take the options of the command, as its command line does; its trainer's check holds."""
    configs = pytest.importorskip(
        "torchtitan.config.configs", reason="torchtitan is not installed: pip install torchtitan"
    )
    tyro = pytest.importorskip("tyro")
    options = options_of(export_saved(folder, "torchtitan").text)
    fields = [("training", configs.TrainingConfig), ("parallelism", configs.ParallelismConfig)]
    job = make_dataclass("Job", [(name, kind, field(default_factory=kind)) for name, kind in fields])
    read = tyro.cli(job, args=[part for name, value in options.items() for part in (f"--{name}", value)])
    per_pass = read.training.local_batch_size * read.parallelism.data_parallel_replicate_degree
    assert read.training.global_batch_size == 64
    assert divmod(64, per_pass) == (4, 0)


@pytest.mark.filterwarnings("default")
def test_composer_runs_its_export(folder: Path) -> None:
    """Its Trainer cuts a device's batch of the step, 32 samples of 64 on two, into 4 micro-batches of 8."""
    composer = pytest.importorskip("composer", reason="composer is not installed: pip install mosaicml")
    names = module_of(export_saved(folder, "composer").text)
    sizes = []

    class Model(composer.ComposerModel):  # type: ignore[misc,name-defined]  it is Any to mypy
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, batch: Any) -> Tensor:
            sizes.append(len(batch[0]))
            output: Tensor = self.layer(batch[0])
            return output

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs.mean()

    loader = DataLoader(TensorDataset(torch.zeros(32, 1)), **names["LOADER"])
    model = Model()
    trainer = composer.Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=sgd(model.parameters()),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        **names["TRAINER"],
    )
    trainer.fit()
    assert sizes == [8] * 4
    assert int(trainer.state.timestamp.batch) == 1


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


def parts() -> tuple[nn.Module, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    data = TensorDataset(torch.randn(30, 3).double(), torch.randn(30, 2).double())
    return model, DataLoader(data, batch_size=12)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(text: str) -> dict[str, Tensor]:
    model, loader = parts()
    state: dict[str, Tensor] = module_of(text)["train"](model, loader, loss_fn, sgd, num_epochs=2).state_dict()
    return state


def on_a_rank(_group: object, text: str) -> dict[str, Tensor]:
    return trained(text)


def on_one_device() -> dict[str, Tensor]:
    model, loader = parts()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        for inputs, targets in loader:
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_the_lines_for_torchrun_train_as_one_device(pool: Any, tmp_path: Path) -> None:
    """On ranks of unequal shares, of which one has none."""
    split = BatchSplit(global_batch_size=12, accumulation_steps=2, shard_sizes=(1, 5))
    path = config_of(2, split=split).save(tmp_path / "split.json")
    made = export_saved(path, "torchrun")
    assert "--nproc-per-node 2" in made.text
    for state in pool.run(on_a_rank, made.text):
        torch.testing.assert_close(state, on_one_device(), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("to", "package"), [("lightning", "pytorch_lightning"), ("transformers", "transformers")])
def test_the_lines_for_the_winner_run(folder: Path, to: str, package: str) -> None:
    """What the export says of its unequal shares inside the tool is what splittune.integrations has."""
    tool = pytest.importorskip(package)
    path = folder / "split.json"
    path.write_text(path.read_text().replace("2xCARD", "2xRTX3090"))
    lines = [
        line.removeprefix("#     ") for line in export_saved(folder, to).text.splitlines() if line.startswith("#     ")
    ]
    made = mock.Mock()
    names: dict[str, Any] = {
        "splittune": splittune,
        "Trainer": made if to == "lightning" else tool.Trainer,
        "model": None,
        "args": None,
        "train_dataset": None,
    }
    code = "\n".join(lines)
    if to == "transformers":  # which makes a Trainer: that is tried where there is a model
        code = code.replace("trainer = SplitTrainer(", "options = dict(")
    exec(code, names)
    if to == "lightning":
        assert made.call_args.kwargs["accumulate_grad_batches"] == 2
    else:
        assert names["options"]["split_config"].split == UNEVEN
        assert issubclass(names["SplitTrainer"], tool.Trainer)


def edited(folder: Path, edit: Callable[[list[str]], list[str]]) -> Path:
    """The folder with its trials' lines changed."""
    path = folder / "trials.csv"
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
    return folder


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [*lines[:2], lines[2][:40]], r"trials.csv, line 3: .*another number of cells"),
        (lambda lines: [lines[0].replace("shard_sizes", "shards"), *lines[1:]], "lacks the columns shard_sizes"),
        (lambda lines: [lines[0], lines[1].replace(",64,", ",many,")], "line 2: .*'many'"),
        (lambda lines: [lines[0], lines[1].replace("8+24", "8+25")], "line 2: .*shard_sizes sum to 8 . 25"),
        (lambda lines: [], "lacks the columns"),
    ],
)
def test_a_half_written_table_is_refused(folder: Path, edit: Callable[[list[str]], list[str]], message: str) -> None:
    """By file and line; nothing is guessed."""
    with pytest.raises(ConfigError, match=message):
        export_saved(edited(folder, edit), "deepspeed")


def test_a_table_that_ends_in_the_middle_of_a_line_is_refused(folder: Path) -> None:
    """Also where all its cells are there: the last one is cut."""
    path = folder / "trials.csv"
    path.write_text(path.read_text().rstrip("\n"))
    with pytest.raises(ConfigError, match=r"trials\.csv is half-written: its last line does not end.*tune again"):
        export_saved(folder, "deepspeed")


def test_a_folder_without_a_config_says_what_it_holds(folder: Path) -> None:
    """A plan's folder has configs of other names."""
    (folder / "split.json").rename(folder / "4xRTX3090-64.json")
    with pytest.raises(ConfigError, match=r"has no split.json.*It holds 4xRTX3090-64.json"):
        export_saved(folder, "deepspeed")


def test_a_config_of_a_newer_schema_is_refused(folder: Path) -> None:
    """As wherever a config is loaded."""
    path = folder / "split.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(ConfigError, match="schema is 99, newer than this splittune reads"):
        export_saved(folder, "torchrun")


def test_a_tool_that_nobody_knows_is_refused(folder: Path) -> None:
    """With those that there are."""
    with pytest.raises(ConfigError, match="no tool is called 'horovod': expected one of torchrun, lightning"):
        export_saved(folder, "horovod")
    with pytest.raises(ConfigError, match=r"no tool is called 'DeepSped': .*Did you mean 'deepspeed'\?"):
        export_saved(folder, "DeepSped")


def test_nothing_is_written_over_without_force(folder: Path) -> None:
    """The file that is there stays as it is."""
    made = export_saved(folder, "deepspeed")
    path = folder / made.file_name
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"ds_config.json is there already.*--force"):
        made.save(path)
    assert path.read_text() == "mine"
    made.save(path, force=True)
    assert json.loads(path.read_text())["train_batch_size"] == 64
    with pytest.raises(ConfigError, match="is a folder"):
        made.save(folder)


def test_the_tuned_cards_are_named_in_their_order() -> None:
    """Tuned on cuda:2 and cuda:0: by the launcher's own option, or by CUDA_VISIBLE_DEVICES."""
    cards = tuple(
        Device(index=index, name="A100", torch_device=f"cuda:{number}", total_bytes=1)
        for index, number in enumerate((2, 0))
    )
    config = config_of(2, split=EVEN, devices=cards, is_modelled=False)
    assert "--include localhost:2,0 " in config.export("deepspeed").text
    for to in ("torchrun", "accelerate", "transformers", "torchtitan", "composer", "lightning"):
        assert "CUDA_VISIBLE_DEVICES=2,0 " in " ".join(config.export(to).text.split())


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    """A version and a device of somebody's invention reach no script."""
    wicked = 'x"""\nimport os; os.abort()\n"""; $(reboot)'
    cards = tuple(Device(index=i, name="a", torch_device=f"cuda:{i};reboot", total_bytes=1) for i in range(2))
    config = config_of(2, split=EVEN, versions={"splittune": wicked}, devices=cards, is_modelled=False)
    for to in TOOLS:
        text = config.export(to).text
        assert "abort" not in text
        assert "reboot" not in text


def test_what_is_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command for a tool that is missing, and another release than the tried one."""
    tool = TOOLS["deepspeed"]
    monkeypatch.setattr("splittune.exports.base.metadata.version", lambda name: "0.1.0+cu128")
    assert tool.about_installed() == "deepspeed 0.1.0+cu128 is installed here; the export was tried with 0.19.8."
    monkeypatch.setattr("splittune.exports.base.metadata.version", lambda name: "0.19.8")
    assert tool.about_installed() == ""
    missing = replace(tool, distribution="no-such-tool")
    monkeypatch.undo()
    assert missing.about_installed() == "no-such-tool is not installed here: pip install no-such-tool==0.19.8"


def test_the_result_of_a_search_is_exported_as_its_folder_is(folder: Path) -> None:
    """The same text, without the detour."""
    for to in TOOLS:
        path = (folder / "split.json").as_posix()
        assert tuned(EVEN).export(to, config_path=path).text == export_saved(folder, to).text
