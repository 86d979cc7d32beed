"""What decides the order of a user's loader: its samplers, and the random numbers they draw."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from splittune.errors import ConfigError
from splittune.parallel.nesting import tensors_of
from splittune.ranks.draws import generators_in, put_back, state_of


class OrderSources:
    """The state of a loader's order: of its generators, and of samplers with a ``state_dict``.

    A loader's samplers are asked, and an `IterableDataset`, which is its own order. Worked:
    ``DataLoader(data, shuffle=True, generator=g)`` has one source, `g`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batch_sampler = loader.batch_sampler
        samplers = _distinct(loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        self.are_torchs = all(type(sampler).__module__ == Sampler.__module__ for sampler in samplers)
        """Whether all samplers are torch's own, which draw from torch's generators only."""
        # the loader's own generator seeds its workers, and those a stream's order
        deciding = [*samplers, loader, loader.dataset] if isinstance(loader.dataset, IterableDataset) else samplers
        self._deciding = generators_in(*deciding)
        self._generators = generators_in(loader, *deciding)
        self._stateful = [part for part in deciding if hasattr(part, "load_state_dict")]
        self._told = [part for part in _distinct(*samplers, loader.dataset) if hasattr(part, "set_epoch")]

    def captured(self) -> dict[str, list[Any]]:
        """Their states now."""
        return {
            "generators": [state_of(generator) for generator in self._generators],
            "samplers": [part.state_dict() for part in self._stateful],
        }

    def put_back(self, states: dict[str, list[Any]]) -> None:
        """As `captured`.

        Raises:
            ConfigError: as many states as sources are not given; nothing is changed.
        """
        for name, sources in (("generators", self._generators), ("samplers", self._stateful)):
            if len(states[name]) != len(sources):
                raise ConfigError(
                    f"a loader's state has {len(states[name])} {name} that keep a state: expected {len(sources)}, "
                    "those of this loader. Build it as the one whose state was saved."
                )
        for generator, state in zip(self._generators, states["generators"], strict=True):
            put_back(generator, state)
        for part, state in zip(self._stateful, states["samplers"], strict=True):
            part.load_state_dict(state)

    def tell(self, epoch: int) -> None:
        """Pass the epoch on to samplers and to the data set, where they have `set_epoch`."""
        for part in self._told:
            part.set_epoch(epoch)

    def digest(self) -> str:
        """12 digits that differ where states do that decide the order: for ranks to compare."""
        states = [*map(state_of, self._deciding), *(part.state_dict() for part in self._stateful)]
        numbers = [tensor.tolist() for _, tensor in tensors_of(states)]
        return hashlib.sha256(f"{numbers}{states}".encode()).hexdigest()[:12]


def _distinct(*parts: Any) -> list[Any]:
    return list({id(part): part for part in parts if part is not None}.values())
