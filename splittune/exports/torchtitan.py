"""A command line of torchtitan."""

from __future__ import annotations

from collections.abc import Iterable

from splittune.config.data import ConfigData
from splittune.exports.base import Export, Tool, commented, head_of, note_on_ranks, visible_devices
from splittune.exports.even import TriedSplit, best_even

TOOL = Tool(
    name="torchtitan",
    distribution="torchtitan",
    tried_with="0.3.0",
    file_name="torchtitan.sh",
    divides_loss="torchtitan divides the loss by the tokens of the step itself.",
)


def export(config: ConfigData, trials: Iterable[TriedSplit], _config_path: str) -> Export:
    """A shell script whose options torchtitan reads; a sample is a sequence of ``training.seq_len`` tokens.

    It checks that ``global_batch_size`` is a multiple of ``local_batch_size`` times the ranks, and accumulates as
    often. Ranks keep all parameters, as under DistributedDataParallel: sharding them has another memory.
    """
    even = best_even(config, trials)
    num_devices = len(config.devices)
    notes = (
        even.cost,
        TOOL.divides_loss,
        "A sample is a sequence of training.seq_len tokens. Releases after 0.3 may count tokens instead of samples.",
        *note_on_ranks(config, TOOL),
    )
    options = {
        "training.local_batch_size": even.share,
        "training.global_batch_size": even.split.global_batch_size,
        "parallelism.data_parallel_replicate_degree": num_devices,
        "parallelism.data_parallel_shard_degree": 1,
    }
    listed = " \\\n".join(f"    --{name} {value}" for name, value in options.items())
    lines = (
        f"{visible_devices(config)}torchrun --standalone --nproc-per-node {num_devices} -m torchtitan.train \\\n"
        f'    --module "${{MODULE:-llama3}}" --config "${{CONFIG:-llama3_debugmodel}}" \\\n{listed} "$@"\n'
    )
    text = "#!/bin/sh\n" + commented(head_of(config, TOOL, notes)) + lines
    return Export(tool=TOOL, text=text, split=even.split, notes=notes)
