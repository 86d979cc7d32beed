"""Twenty models that people train, of timm and transformers, with weights drawn at random and made-up batches.

Nothing is fetched: timm's models are named and made without weights, those of transformers from a configuration.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.jobs.gpu_models import OPTIMIZERS
from splittune.training import TrainingTask

NUM_CLASSES = 1000
VOCABULARY = 30_522
"""Of BERT; the others are given the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One model, how it is made, and a batch that takes some 4 to 8 GiB of a card in half precision."""

    name: str
    library: str
    """What must be installed for it: ``"timm"`` or ``"transformers"``; empty where nothing must."""
    make: Callable[[], nn.Module]
    batch_size: int
    draw: Callable[[int, torch.Generator], Any]
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    """None where the model computes its own."""
    optimizer: str = "AdamW"
    in_half: bool = True
    """Under autocast to half precision."""

    def task(self, batch_size: int, *, seed: int, half: torch.dtype = torch.bfloat16) -> TrainingTask:
        """A job over one batch of that size; weights and data are drawn from `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = self.make()
        batch = self.draw(batch_size, torch.Generator().manual_seed(seed))
        return TrainingTask(
            model,
            [batch],
            loss_fn=self.loss_fn,
            optimizer=OPTIMIZERS[self.optimizer],
            autocast_dtype=half if self.in_half else None,
        )


def why_missing(library: str) -> str | None:
    """Why a library cannot be used here, in one line; None where it can, or none is wanted."""
    if not library:
        return None
    try:
        importlib.import_module(library)
    except Exception as error:  # noqa: BLE001  one that is broken, for want of torchvision's operators say, is as good as none
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return None


def _images(side: int, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(num_samples, 3, side, side, generator=generator)
    return images, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)


def _timm(
    name: str, batch_size: int, *, side: int = 224, optimizer: str = "SGD", in_half: bool = True, **options: Any
) -> ZooModel:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=NUM_CLASSES, **options)
        return model

    return ZooModel(
        name=name,
        library="timm",
        make=make,
        batch_size=batch_size,
        draw=partial(_images, side),
        loss_fn=functional.cross_entropy,
        optimizer=optimizer,
        in_half=in_half,
    )


def _texts(length: int, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens, each of them a label as well."""
    tokens = torch.randint(VOCABULARY, (num_samples, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _labelled_texts(length: int, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (num_samples, length), generator=generator)
    return {"input_ids": tokens, "labels": torch.randint(2, (num_samples,), generator=generator)}


def _pixels(side: int, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    images, labels = _images(side, num_samples, generator)
    return {"pixel_values": images, "labels": labels % 2}


def _hugging_face(
    name: str,
    cls: str,
    batch_size: int,
    draw: Callable[[int, torch.Generator], Any],
    *,
    in_half: bool = True,
    **config: Any,
) -> ZooModel:
    """`cls` made from its own configuration, with these entries instead of the published ones."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, cls)
        model: nn.Module = kind(kind.config_class(**config))
        return model

    return ZooModel(name=name, library="transformers", make=make, batch_size=batch_size, draw=draw, in_half=in_half)


_TEXTS = partial(_texts, 512)
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}

ZOO: tuple[ZooModel, ...] = (
    # of each kind of operation some: dense, grouped and depthwise convolutions, attention whole and in windows
    _timm("resnet50", 64),
    _timm("vit_small_patch16_224", 128, optimizer="AdamW"),
    _hugging_face("gpt2", "GPT2LMHeadModel", 6, _TEXTS, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0),
    _timm("efficientnet_b0", 96),
    _hugging_face("bert-base", "BertForMaskedLM", 8, _TEXTS),
    _timm("convnext_tiny", 64, optimizer="AdamW"),
    _timm("resnext50_32x4d", 64),
    _hugging_face("llama of 12 layers", "LlamaForCausalLM", 8, _TEXTS, **_LLAMA),
    _timm("swin_tiny_patch4_window7_224", 64, optimizer="AdamW"),
    _timm("mobilenetv3_large_100", 128),
    _hugging_face("t5-small", "T5ForConditionalGeneration", 8, _TEXTS, vocab_size=VOCABULARY, decoder_start_token_id=0),
    _timm("densenet121", 64),
    _timm("regnety_016", 96),
    _hugging_face("distilbert", "DistilBertForSequenceClassification", 32, partial(_labelled_texts, 256)),
    _timm("mixer_s16_224", 128, optimizer="AdamW"),
    _timm("vgg11_bn", 32, in_half=False),
    _hugging_face(
        "albert-base",
        "AlbertForMaskedLM",
        8,
        _TEXTS,
        vocab_size=VOCABULARY,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
    ),
    _timm("poolformer_s12", 96, optimizer="AdamW"),
    _hugging_face("vit-base", "ViTForImageClassification", 32, partial(_pixels, 224), in_half=False),
    _hugging_face("segformer-b0", "SegformerForImageClassification", 192, partial(_pixels, 224)),
)
