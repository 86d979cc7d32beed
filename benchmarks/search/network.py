"""A network as kernels and tensors: what one replica computes and allocates, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.search.cards import Card
from splittune.hardware.virtual.allocator import Block, CachingAllocator

Floats = NDArray[np.float64]

TILE = 128
"""Rows and columns of a product that one block of threads computes, as large kernels of cuBLAS do."""
LAUNCH_S = 7e-6
"""To launch a kernel from Python takes between 5 and 10 microseconds."""
REACHED = 0.7
"""The part of a card's peak that a large product reaches."""
WITHOUT_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One product and what is computed element by element after it, in half precision."""

    rows: int
    """Of a sample: tokens or pixels."""
    inner: int
    columns: int
    parameter_bytes: int
    input_bytes: int
    """Of a sample; its gradient is as large. A convolution reads them nine times, from caches but for the first."""
    saved_bytes: tuple[int, ...]
    """Of a sample: tensors that stay until backward."""
    num_small_kernels: int
    """Element by element: each reads and writes the output once."""
    repeats: int = 1
    """Layers alike, one after another, whose parameters and saved tensors are held as if they were one's."""
    workspace_bytes: int = 0
    """Of a convolution whose algorithm is chosen by the batch: for 1 sample, and twice for each doubling of it."""
    workspace_from: int = 1
    """Samples below which that algorithm is not chosen."""

    def workspace(self, share: int) -> int:
        """Grows in steps, with the power of two at or below the share: 5 samples take four times as much as 1."""
        return self.workspace_bytes << (share.bit_length() - 1) if share >= self.workspace_from else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Layers one after another, and an optimizer on GPU 0."""

    layers: tuple[Layer, ...]
    state_parts: int
    """Tensors of optimizer state for each parameter: 0 of SGD, 1 with momentum, 2 of Adam."""
    is_foreach: bool
    """An update of all parameters at once holds as much again for a moment."""
    output_bytes: int
    """Of a sample, gathered on GPU 0 for the loss; 0 where replicas compute their own."""

    @property
    def parameter_bytes(self) -> int:
        return sum(self.parameter_sizes)

    @property
    def parameter_sizes(self) -> list[int]:
        return [layer.parameter_bytes * layer.repeats for layer in self.layers]

    @property
    def launches_s(self) -> float:
        """Of one replica: backward launches twice as many kernels as forward."""
        return 3 * LAUNCH_S * sum(layer.repeats * (1 + layer.num_small_kernels) for layer in self.layers)

    def with_own_losses(self) -> Network:
        """This network with a loss in each replica."""
        return replace(self, output_bytes=0)

    def replica_s(self, card: Card, most: int) -> Floats:
        """Forward and backward of 0 ... `most` samples: kernels run in order, each once it is launched."""
        shares = np.arange(most + 1)
        kernels = [(layer, self._kernel_s(layer, card, shares)) for layer in self.layers]
        passes = [(1, kernel) for kernel in kernels] + [(2, kernel) for kernel in reversed(kernels)]
        launched_s, ended_s = 0.0, np.zeros(most + 1)
        for times, (layer, kernel_s) in passes:
            launched_s += LAUNCH_S * times * layer.repeats * (1 + layer.num_small_kernels)
            ended_s = np.maximum(ended_s + times * layer.repeats * kernel_s, launched_s)
        return np.where(shares > 0, ended_s, 0.0)

    def _kernel_s(self, layer: Layer, card: Card, shares: NDArray[np.int64]) -> Floats:
        """The roofline in whole waves: one block more than there are multiprocessors takes twice as long."""
        blocks = -(-shares * layer.rows // TILE) * -(-layer.columns // TILE)
        waves = -(-blocks // card.num_sms)
        of_block_s = 2 * TILE * TILE * layer.inner / (REACHED * card.flops_per_s / card.num_sms)
        moved = shares * (layer.input_bytes + 2 * layer.rows * layer.columns) + 2 * layer.inner * layer.columns
        small = 4 * layer.num_small_kernels * shares * layer.rows * layer.columns
        return np.asarray(
            np.maximum(waves * of_block_s, moved / card.bandwidth_bytes_per_s) + small / card.bandwidth_bytes_per_s
        )

    def least_bytes(
        self, shares: NDArray[np.int64], micro_batch_size: int, *, is_first: bool, is_held: bool
    ) -> NDArray[np.int64]:
        """What is surely alive at once when backward begins: never more than a replay reserves."""
        saved = sum(sum(layer.saved_bytes) * layer.repeats for layer in self.layers) * shares
        resting = self.parameter_bytes * (1 + int(is_held))
        if is_first:
            state = self.state_parts * self.parameter_bytes
            return np.asarray(resting + state + saved + self.output_bytes * micro_batch_size)
        return np.asarray(np.where(shares > 0, resting + saved, 0))


class Replay:
    """Steps of training through a caching allocator, tensor by tensor: what each phase held at most.

    The loop keeps its last output until the next one is there, as loops do, so a step rests on what came before.
    `peaks` has the five readings of a trial, by the names of `DeviceMemory`, and `reserved_bytes` what
    the card reserved at most, segments and all. On a card that is full the allocator hands its free segments back, and
    tries again; `ran` says whether that was enough.
    """

    def __init__(
        self,
        network: Network,
        share: int,
        micro_batch_size: int,
        *,
        is_first: bool,
        is_held: bool,
        capacity_bytes: int = WITHOUT_LIMIT,
    ) -> None:
        self.network, self.share, self.micro_batch_size = network, share, micro_batch_size
        self.is_first, self.is_held = is_first, is_held
        self.allocator = CachingAllocator(capacity_bytes)
        self.peaks = dict.fromkeys(
            (
                *("resting_bytes", "micro_step_peak_bytes", "single_step_peak_bytes", "update_peak_bytes"),
                "before_backward_bytes",
            ),
            0,
        )
        self.reserved_bytes = 0
        self.ran = True
        self.kept_output: list[Block] = []
        if is_first or share:
            try:
                self._run()
            except MemoryError:
                self.ran = False

    def _run(self) -> None:
        parameters = self._take_all(self.network.parameter_sizes) if self.is_first else []
        state: list[Block] = []
        for step in range(2 if self.is_first else 1):
            copies = [] if self.is_first else self._take_all(self.network.parameter_sizes)
            gradients: list[Block] = []
            for micro_step in range(2 if self.is_held else 1):
                self.allocator.reset_peaks()
                resting = self.allocator.allocated_bytes
                gradients = self._micro_step(gradients)
                if step or not self.is_first:
                    self._note("resting_bytes", resting)
                    peak = self.allocator.peak_allocated_bytes
                    self._note("micro_step_peak_bytes", peak)
                    self._note("single_step_peak_bytes", peak if micro_step == 0 else 0)
            if not self.is_first:
                # gradients are home, and the replica is gone, before GPU 0 updates
                self._give_all([*gradients, *copies])
                continue
            self.allocator.reset_peaks()
            state = state or self._take_all(self.network.parameter_sizes * self.network.state_parts)
            self._give_all(self._take_all(self.network.parameter_sizes) if self.network.is_foreach else [])
            self._note("update_peak_bytes", self.allocator.peak_allocated_bytes if step else 0)
            self._give_all(gradients)
        self.kept = [*parameters, *state]

    def _micro_step(self, held: list[Block]) -> list[Block]:
        """Forward, the loss on GPU 0, and backward; the gradients, those held already added to."""
        share, layers = self.share, self.network.layers
        saved: list[list[Block]] = []
        for layer in layers if share else ():
            workspace = self._take_all([layer.workspace(share)])
            saved.append(self._take_all([share * num_bytes * layer.repeats for num_bytes in layer.saved_bytes]))
            self._give_all(workspace)
        gathered = self._take_all([self.micro_batch_size * self.network.output_bytes] * 2 if self.is_first else [])
        self._give_all([*gathered[:1], *self.kept_output])
        self.kept_output = gathered[1:]
        self._note("before_backward_bytes", self.allocator.allocated_bytes)
        gradients: list[Block] = []
        flowing: list[Block] = []
        for layer in reversed(layers) if share else ():
            workspace = self._take_all([layer.workspace(share)])
            following = self._take_all([share * layer.input_bytes])
            gradients += self._take_all([layer.parameter_bytes * layer.repeats])
            self._give_all([*workspace, *flowing, *saved.pop()])
            flowing = following
            if held:
                self._give_all([gradients.pop()])
        self._give_all(flowing)
        if self.is_first and not held and not share:
            gradients = self._take_all(self.network.parameter_sizes)
        return held or gradients

    def _take_all(self, sizes: list[int]) -> list[Block]:
        blocks = []
        for num_bytes in filter(None, sizes):
            block = self.allocator.allocate(num_bytes)
            if block is None:
                raise MemoryError
            blocks.append(block)
            self.reserved_bytes = max(self.reserved_bytes, self.allocator.reserved_bytes)
        return blocks

    def _give_all(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.allocator.free(block)

    def _note(self, name: str, num_bytes: int) -> None:
        self.peaks[name] = max(self.peaks[name], num_bytes)


def drawn_network(rng: np.random.Generator, sample_bytes: float, parameter_bytes: float) -> tuple[Network, str]:
    """Transformer, convolutions or an MLP, with about so many bytes of activations a sample and of parameters."""
    form = str(rng.choice(["transformer", "convolutions", "mlp"], p=[0.45, 0.4, 0.15]))
    num_layers = int(rng.integers(2, 6))
    repeats = int(rng.choice([1, 2, 4, 8, 16]))
    sample_bytes, parameter_bytes = sample_bytes / repeats, parameter_bytes / repeats
    if form == "convolutions":
        layers = _convolutions(rng, num_layers, sample_bytes, parameter_bytes)
        if rng.random() < 0.5:
            form += " with workspaces"
    elif form == "transformer":
        layers = _transformer(rng, num_layers, sample_bytes, parameter_bytes)
    else:
        layers = _mlp(num_layers, sample_bytes, parameter_bytes)
    if not form.endswith("workspaces"):
        layers = [replace(layer, workspace_bytes=0) for layer in layers]
    layers = [replace(layer, repeats=repeats) for layer in layers]
    has_outputs = rng.random() < 0.55
    network = Network(
        layers=tuple(layers),
        state_parts=int(rng.integers(0, 3)),
        is_foreach=bool(rng.random() < 0.5),
        output_bytes=int(repeats * sample_bytes * 10 ** rng.uniform(-3, -0.8)) if has_outputs else 0,
    )
    return network, form + (", outputs gathered" if has_outputs else "")


def _transformer(rng: np.random.Generator, num_layers: int, sample_bytes: float, parameter_bytes: float) -> list[Layer]:
    """Blocks of two products each: an attention's and a feed-forward one."""
    width = int(np.clip((parameter_bytes / num_layers / 24) ** 0.5 // 64 * 64, 512, 8192))
    tokens = int(np.clip(sample_bytes / (num_layers * 2 * width * 17), 16, 131_072))
    of_token = 2 * width * tokens
    attention = Layer(
        rows=tokens,
        inner=width,
        columns=4 * width,
        parameter_bytes=8 * width * width,
        input_bytes=of_token,
        saved_bytes=(of_token, 3 * of_token, of_token, of_token),
        num_small_kernels=int(rng.integers(4, 9)),
    )
    feed_forward = Layer(
        rows=tokens,
        inner=2 * width,
        columns=4 * width,
        parameter_bytes=16 * width * width,
        input_bytes=of_token,
        saved_bytes=(of_token, 4 * of_token, 4 * of_token, of_token),
        num_small_kernels=int(rng.integers(2, 5)),
    )
    return [attention, feed_forward] * num_layers


def _convolutions(
    rng: np.random.Generator, num_layers: int, sample_bytes: float, parameter_bytes: float
) -> list[Layer]:
    """Stages of half the pixels on a side and twice the channels; most memory is in the first."""
    channels = int(rng.choice([32, 64, 96]))
    widest = int(np.clip((parameter_bytes / (36 * num_layers)) ** 0.5, channels, 1024))
    in_stage = max(2, num_layers // 2)
    full_layers = sum(0.5 ** (index // in_stage) for index in range(num_layers * 2))
    pixels = int(np.clip(sample_bytes / (4 * channels * full_layers), 64, 1 << 24))
    layers = []
    for index in range(num_layers * 2):
        if index and index % in_stage == 0 and pixels > 64:
            pixels, channels = pixels // 4, min(2 * channels, widest)
        of_output = 2 * channels * pixels
        layers.append(
            Layer(
                rows=pixels,
                inner=9 * channels,
                columns=channels,
                parameter_bytes=2 * 9 * channels * channels,
                input_bytes=of_output,
                saved_bytes=(of_output, of_output),
                num_small_kernels=3,
                workspace_bytes=int(of_output * rng.choice([0, 0, 2, 5])),
                workspace_from=int(rng.choice([1, 2, 4, 8])),
            )
        )
    return layers


def _mlp(num_layers: int, sample_bytes: float, parameter_bytes: float) -> list[Layer]:
    width = int(np.clip((parameter_bytes / num_layers / 2) ** 0.5 // 64 * 64, 512, 16_384))
    rows = int(np.clip(sample_bytes / (num_layers * 4 * width), 1, 65_536))
    layer = Layer(
        rows=rows,
        inner=width,
        columns=width,
        parameter_bytes=2 * width * width,
        input_bytes=2 * width * rows,
        saved_bytes=(2 * width * rows, 2 * width * rows),
        num_small_kernels=2,
    )
    return [layer] * num_layers
