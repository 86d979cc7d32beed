"""A small language model with texts of unequal lengths, trained by Transformers' Trainer under a config."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import splittune
from splittune import BatchSplit, SplitConfig
from splittune.exports import TriedSplit

LENGTH, VOCABULARY, SAMPLES, EPOCHS = 6, 20, 30, 2


class Texts(Dataset[dict[str, Tensor]]):
    """Of the second half of each text, some tokens do not count; `by_sample` gives a class for each instead."""

    def __init__(self, *, by_sample: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        self.labels[torch.rand(self.ids.shape, generator=generator) < 0.5] = -100
        self.labels[:, 2] = self.ids[:, 2]
        if by_sample:
            self.labels = self.ids[:, 0] % 3

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def model_of(kind: str) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "tokens":
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            pad_token_id=0,
        )
        model: nn.Module = LlamaForCausalLM(config)
        return model
    classes = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return BertForSequenceClassification(classes)  # type: ignore[no-any-return]


def train(config: SplitConfig | None, kind: str, folder: Path, *, batch_size: int = 12) -> list[list[Tensor]]:
    """The gradients of every step; without a config by Transformers' own Trainer in one piece."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from splittune.integrations.transformers import SplitTrainerMixin

    gradients: list[list[Tensor]] = []

    class Keep(TrainerCallback):  # type: ignore[misc]  it is Any to mypy
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])

    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=1 if config is None else config.split.accumulation_steps,
        num_train_epochs=EPOCHS,
        max_grad_norm=0.0,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        train_sampling_strategy="sequential",
        disable_tqdm=True,
    )
    parts: dict[str, Any] = {
        "model": model_of(kind),
        "args": args,
        "train_dataset": Texts(by_sample=kind == "samples"),
        "callbacks": [Keep()],
    }
    if config is None:
        Trainer(**parts).train()
    else:
        SplitTrainerMixin(**parts, split_config=config).train()
    return gradients


def weighed_parts() -> tuple[nn.Module, DataLoader[Any]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 3), torch.randn(SAMPLES, 2))
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), DataLoader(data, batch_size=12)


class KeepingSGD(torch.optim.SGD):
    """Keeps the gradients of every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.gradients: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        self.gradients.append([parameter.grad.clone() for parameter in self.param_groups[0]["params"]])
        return super().step(closure)


def train_by_accelerate(config: SplitConfig) -> list[list[Tensor]]:
    """By the lines that the export for Accelerate holds for the winner's own shares, as they stand there."""
    even = BatchSplit.even(global_batch_size=12, accumulation_steps=1, num_devices=2)
    tried = TriedSplit(split=even, kind="search", outcome="ok", throughput=1.0)
    text = config.export("accelerate", trials=[tried]).text
    lines = [line.removeprefix("#     ") for line in text.splitlines() if line.startswith("#     ")]
    model, loader = weighed_parts()
    optimizer = KeepingSGD(model.parameters())
    names = {
        "accelerate": accelerate,
        "accelerator": accelerate.Accelerator(cpu=True),
        "config": config,
        "loader": loader,
        "loss_fn": nn.functional.mse_loss,
        "model": model,
        "optimizer": optimizer,
        "splittune": splittune,
    }
    exec("\n".join(line for line in lines if "SplitConfig.load" not in line), names)
    return optimizer.gradients


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {
        (file.stem, kind): train(SplitConfig.load(file), kind, folder)
        for file in sorted(folder.glob("*.json"))
        for kind in ("tokens", "samples")
    }
    for file in sorted(folder.glob("*.json")):
        found[file.stem, "accelerate"] = train_by_accelerate(SplitConfig.load(file))
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")
    # Accelerate leaves the group to the end of the process, where gloo's threads may abort it
    torch.distributed.destroy_process_group()
