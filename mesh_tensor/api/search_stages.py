"""Stages on meshes of different sizes, of a model as pieces: choices that dynamic programming cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from mesh_tensor.searching.choices import Choice, Part, Question, Space, cut_best
from mesh_tensor.searching.pieces import Composer, Stage

from .model_pieces import ModelPieces


def uneven_choices(pieces: ModelPieces, composer: Composer, space: Space, limit: int) -> Iterator[Choice]:
    """Per number of microbatches, ZeRO, recomputation and sequence parallelism: the best stages on meshes of different
    sizes, in 1F1B, that devices of so many bytes hold; nothing where meshes of one size are better."""
    counts = [count for count in space.counts(1) if pieces.takes(space.batch // count)]
    for count, zero, again, sequence in product(counts, space.zero, space.recompute, space.sequence):
        base = Choice(microbatches=count, schedule="1f1b", zero=zero, recompute=again, sequence=sequence)
        parts = cut_best(_Cut(base, pieces, composer, space).question(limit))
        if parts is None or len({(part.data, part.model) for part in parts}) == 1:
            continue
        data, model = (max(getattr(part, name) for part in parts) for name in ("data", "model"))
        if (data > 1 or not zero) and (model > 1 or not sequence):  # else it is another one
            yield replace(base, data=data, model=model, meshes=len(parts), parts=parts)


@dataclass(frozen=True)
class _Cut:
    """What a choice's stages take, whatever they are cut into."""

    base: Choice
    pieces: ModelPieces
    composer: Composer
    space: Space

    def question(self, limit: int) -> Question:
        """How it is cut best."""
        space, rows = self.space, self.space.batch // self.base.microbatches
        sizes = [(d, m) for m in space.model for d in range(1, space.devices // m + 1) if rows % d == 0]
        count = self.base.microbatches
        return Question(space.layers, space.devices, count, sizes, self._seconds, self._memory, limit)

    def _here(self, part: Part, first: bool, last: bool) -> tuple[Choice, Stage, int]:
        choice = replace(self.base, data=part.data, model=part.model, meshes=2)
        model = self.pieces.models(choice, self.space.batch)[0]
        return choice, model.stage(part.layers, first, last), model.layer.received

    def _seconds(self, part: Part, first: bool, last: bool) -> float:
        return self.composer.part_seconds(*self._here(part, first, last))

    def _memory(self, part: Part, first: bool, last: bool, held: int) -> float:
        choice, stage, _ = self._here(part, first, last)
        return self.composer.part_memory(choice, stage, held)
