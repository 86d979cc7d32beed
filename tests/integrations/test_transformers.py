"""Hugging Face models with the configs they come with: tuned, trained as on one device, and found as they were."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splittune import BalancedDataParallel, BatchSplit, ConfigError, autotune
from splittune.config.micro_batches import cut_batch
from splittune.parallel import accumulate
from splittune.parallel.caches import LeftOutCache
from splittune.parallel.replicas import hook_tables_of
from tests.training.state import state_of

transformers = pytest.importorskip("transformers")

BATCH = 12
LENGTH = 7
VOCABULARY = 50
# Cards of unlike shares, and two micro-batches a step.
UNEVEN = BatchSplit(global_batch_size=BATCH, accumulation_steps=2, shard_sizes=(1, 1, 2, 2))
EVEN = BatchSplit.even(global_batch_size=BATCH, accumulation_steps=1, num_devices=4)
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

Batch = Mapping[str, Any]


def texts(step: int, *, padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[::3, LENGTH // 2 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def language(step: int) -> Batch:
    batch = texts(step)
    return {**batch, "labels": batch["input_ids"]}


def sequences(step: int) -> Batch:
    """As a tokenizer gives them."""
    return transformers.BatchEncoding({**texts(step, padded=True), "labels": torch.arange(BATCH) % 3})  # type: ignore[no-any-return]


def pictures(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator), "labels": torch.arange(BATCH) % 3}


def sizes(**more: Any) -> dict[str, Any]:
    """Of the models that take their sizes by these names; dropout alone is off, to be compared with one device."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        **SPECIAL_TOKENS,
        **more,
    }


@dataclass(frozen=True)
class Family:
    """A model class, its config's class and the sizes that make it tiny; all else is the default."""

    model: str
    config: str
    options: dict[str, Any]
    batch: Callable[[int], Batch] = language

    def build(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options, **options)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ONE_KEY = {"num_key_value_heads": 1}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **SPECIAL_TOKENS,
}
QWEN2_MOE = sizes(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=16, **ONE_KEY
)
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
    **NO_DROPOUT,
}
FAMILIES = {
    "GPT-2": Family("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", sizes(**ONE_KEY)),
    "Qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", sizes(**ONE_KEY)),
    "Mistral": Family("MistralForCausalLM", "MistralConfig", sizes(**ONE_KEY)),
    "Mixtral": Family("MixtralForCausalLM", "MixtralConfig", sizes(num_local_experts=4, **ONE_KEY)),
    "Qwen2-MoE": Family("Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN2_MOE),
    "BERT": Family("BertForSequenceClassification", "BertConfig", sizes(num_labels=3, **NO_DROPOUT), sequences),
    "T5": Family("T5ForConditionalGeneration", "T5Config", T5),
    "ViT": Family("ViTForImageClassification", "ViTConfig", VIT, pictures),
}
# What models call the cache that they take and return: past_key_values before transformers 5.24.
CACHE = "cache" if "cache" in inspect.signature(transformers.GPT2LMHeadModel.forward).parameters else "past_key_values"
CACHING = ("GPT-2", "Llama", "Mistral", "Mixtral", "T5")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained_on_one_device(model: nn.Module, batches: list[Batch]) -> nn.Module:
    optimizer = sgd(model.parameters())
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_same_parameters(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (mine - theirs).abs().max()
        assert difference <= 1e-5, f"{name} differs by {difference}"


def hooks_of(model: nn.Module) -> list[int]:
    return [len(table) for module in model.modules() for table in hook_tables_of(module).values()]


def on_four(model: nn.Module, **options: Any) -> BalancedDataParallel:
    return BalancedDataParallel(module=model, shard_sizes=(1, 4, 5, 2), device_ids=["cpu"] * 4, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_with_its_default_config(name: str) -> None:
    """Tuned on four cards and found as it was; three steps under the config, and an uneven one, are one device's."""
    family = FAMILIES[name]
    batches = [family.batch(step) for step in range(3)]
    model = family.build()
    expected = trained_on_one_device(copy.deepcopy(model), batches)
    before = state_of(model), hooks_of(model), model.config.to_dict()
    config = autotune(model, batches, optimizer=sgd, devices="4xT4", max_trials=1, progress=False).config
    assert (state_of(model), hooks_of(model), model.config.to_dict()) == before
    for split in (config.split, UNEVEN):
        tuned, trained = replace(config, split=split), copy.deepcopy(model)
        wrapped = tuned.wrap(trained)
        optimizer = sgd(trained.parameters())
        for batch in batches:
            for micro in tuned.micro_batches(batch, wrapped):
                (wrapped(**micro.batch).loss * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(trained, expected)


# hooks that a first forward installs


@pytest.mark.parametrize("engine", ["window", "torch"])
@pytest.mark.parametrize("name", ["BERT", "Llama", "Mixtral", "T5"])
def test_captured_outputs_are_those_of_one_device(name: str, engine: Any) -> None:
    """Hidden states and attentions, of training forwards one after another, and no more hooks than a bare model has."""
    family = FAMILIES[name]
    build = partial(family.build, output_hidden_states=True, output_attentions=True, attn_implementation="eager")
    model, other = build(), build()
    wrapped = on_four(model, engine=engine)
    for step in range(2):
        batch = family.batch(step)
        got, expected = wrapped(**batch), other(**batch)
        kept = [key for key in expected if key != CACHE]
        assert [key for key in got if key != CACHE] == kept
        assert any("hidden_states" in key for key in kept)
        assert any("attentions" in key for key in kept)
        for key in kept:
            torch.testing.assert_close(got[key], expected[key], atol=1e-5, rtol=1e-5)
        got.loss.backward()
        assert sum(hooks_of(model)) <= sum(hooks_of(other))


def test_a_model_that_captures_is_tuned_and_found_without_hooks() -> None:
    """Whatever the trials' forwards installed is gone, on one card, which runs the model itself, as on four."""
    family = FAMILIES["BERT"]
    model = family.build(output_hidden_states=True)
    before = hooks_of(model), model.config.to_dict(), dict(vars(model))
    for devices in ("1xT4", "4xT4"):
        autotune(model, [family.batch(0)], devices=devices, max_trials=1, progress=False)
        assert (hooks_of(model), model.config.to_dict(), dict(vars(model))) == before
    assert len(model(**family.batch(0)).hidden_states) == 3


# caches


def decoded(model: nn.Module, name: str, **options: Any) -> list[Tensor]:
    """The logits of three tokens, one after the other, each forward given the cache of the one before."""
    tokens, logits, past = texts(0)["input_ids"], [], options.pop(CACHE, None)
    for position in range(3):
        token = tokens[:, position : position + 1]
        inputs = {"input_ids": tokens, "decoder_input_ids": token} if name == "T5" else {"input_ids": token}
        output = model(**inputs, **{CACHE: past}, use_cache=True)
        logits.append(output.logits)
        past = output[CACHE]
    return logits


@pytest.mark.parametrize("name", CACHING)
def test_a_cache_is_joined_where_nothing_is_trained(name: str) -> None:
    """Decoding token by token through the wrapper is decoding on one device."""
    model = FAMILIES[name].build().eval()
    with torch.no_grad():
        torch.testing.assert_close(decoded(on_four(model), name), decoded(model, name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CACHING)
def test_a_training_step_has_no_cache_and_says_so(name: str) -> None:
    """A forward that records gradients leaves it out; a model that is given what stands there instead says why."""
    model = on_four(FAMILIES[name].build())
    output = model(**FAMILIES[name].batch(0))
    assert isinstance(output[CACHE], LeftOutCache)
    with pytest.raises((AttributeError, TypeError), match="left out: it would take memory on the output device"):
        decoded(model, name)


def test_training_through_a_cache_begins_with_an_empty_one() -> None:
    """Given a cache, a training forward returns it, joined and with its graph: the gradient is that of one device."""
    model, other = FAMILIES["GPT-2"].build(), FAMILIES["GPT-2"].build()
    for each in (on_four(model), other):
        torch.cat(decoded(each, "GPT-2", **{CACHE: transformers.DynamicCache()}), 1).square().mean().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def test_a_static_cache_is_refused_by_name() -> None:
    """What cannot be split is told, and how to go on."""
    model = FAMILIES["GPT-2"].build()
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(ConfigError, match=r"a StaticCache cannot be split over devices .* Pass use_cache=False"):
        on_four(model)(input_ids=texts(0)["input_ids"], **{CACHE: cache})


# means over tokens


def padded_labels(step: int) -> dict[str, Tensor]:
    batch = texts(step)
    labels = batch["input_ids"].clone()
    labels[: BATCH // 2, 2:] = -100
    return {**batch, "labels": labels}


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("split", [EVEN, UNEVEN], ids=str)
def test_a_mean_over_the_tokens_of_the_whole_batch(as_tensor: bool, split: BatchSplit) -> None:
    """With num_items_in_batch in the batch, uneven padding, cards and micro-batches change neither
    loss nor gradient."""
    batch: dict[str, Any] = padded_labels(0)
    count = (batch["labels"][:, 1:] != -100).sum()
    batch["num_items_in_batch"] = count if as_tensor else int(count)
    model, other = FAMILIES["GPT-2"].build(), FAMILIES["GPT-2"].build()
    expected = other(**batch).loss
    expected.backward()
    wrapped = BalancedDataParallel(module=model, shard_sizes=split.shard_sizes, device_ids=["cpu"] * 4)
    total = 0.0
    for micro in accumulate(wrapped, cut_batch(batch, split, wrapped.weight_of)):
        loss = wrapped(**micro.batch).loss * micro.weight
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)
