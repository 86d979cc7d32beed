"""autotune() as a collective: real processes on virtual cards, one of which each takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from splittune import TuneResult, autotune
from splittune.report.tables import devices_table, trials_table
from tests.ranks.pool import Pool, pool_of
from tests.runners.modelled_ranks.jobs import products

DEVICES = "1xT4,1xA10"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two ranks."""
    with pool_of(2, tmp_path_factory.mktemp("collective")) as ranks:
        yield ranks


def tuned(group: dist.ProcessGroup | None, devices: str = DEVICES, **options: Any) -> TuneResult:
    task = products(512)
    given: dict[str, Any] = {"global_batch_size": 4096, "progress": False, "max_trials": 4, "strategy": "ddp"}
    return autotune(task.model, task.loader, devices=devices, **given | options)


def tables(result: TuneResult) -> tuple[str, str]:
    trials = trials_table(result.trials, is_modelled=True).to_csv()
    return trials, devices_table(result.trials, devices=result.config.devices).to_csv()


def test_all_ranks_have_the_result_of_one_process(pool: Pool) -> None:
    """The same trials to the last digit, though each card's were run by its rank."""
    alone = tuned(None)
    for result in pool.run(tuned):
        assert tables(result) == tables(alone)
        assert result.config.split == alone.config.split
        assert result.explanation == alone.explanation
