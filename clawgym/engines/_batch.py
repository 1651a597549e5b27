"""The running sequences of a model, and one step of all of them.

Each step decodes one token of every decoding sequence and computes up to ``chunk`` tokens of prompts, so that a long
prompt does not stall others. The prefix that a prompt shares with an earlier sequence is copied. On a CPU, threads
compute parts of a step beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from clawgym.engines._crew import Crew
from clawgym.engines._graphs import DecodeGraphs
from clawgym.engines._prefix import BLOCK, PrefixStore, packed
from clawgym.engines._sample import sample
from clawgym.engines._slots import Decode, KVShape, Plan, Prefill, Slab, capacity_for
from clawgym.engines.load import Run
from clawgym.engines.lora import Adapter, AdapterHooks
from clawgym.records import common_prefix

__all__ = ["RunningBatch", "OutOfMemory", "Sequence"]

ALONE = 4
"""Multiple of ``chunk`` that is computed while no sequence decodes."""
WORTH_WAITING = 64
"""A prompt waits for another one being computed if it shares at least this many additional ids with it."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One prompt and its sampled continuation."""

    ids: list[int]
    """The prompt, then the sampled ids."""
    temperature: float
    top_k: int
    """0: disabled."""
    top_p: float
    uniform: Callable[[], float]
    """Its own generator of random numbers in [0, 1)."""
    prompt: int = field(init=False)
    """Number of prompt ids."""
    length: int = field(default=0, init=False)
    """Number of ``ids`` whose keys and values are computed."""
    cached: int = field(default=0, init=False)
    """Number of them that were copied from the prefix cache."""
    adapter: Adapter | None = field(default=None, init=False)
    root: int = field(default=0, init=False)
    buffer: torch.Tensor | None = field(default=None, init=False)
    """(layers, 2, kv_heads, capacity, head_dim), until the prompt is computed."""
    slab: Any = field(default=None, init=False)
    row: int = field(default=-1, init=False)

    number: float = field(init=False)
    """The random number for its next token."""

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)
        self.number = self.uniform()

    @property
    def kv(self) -> torch.Tensor:
        """Its keys and values, in place: (layers, 2, kv_heads, capacity, head_dim)."""
        if self.slab is not None:
            return self.slab.view(self)
        assert self.buffer is not None
        return self.buffer


_S = TypeVar("_S", bound=Sequence)


class OutOfMemory(Exception):
    """There is not enough memory for this sequence; without it the others can continue."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__("out of memory")
        self.sequence = sequence


class RunningBatch(Generic[_S]):
    """The running sequences. Belongs to one thread, which calls it inside ``torch.inference_mode()``."""

    def __init__(
        self, model: Any, run: Run, shape: KVShape, *, window: int, rows: int, kv_tokens: int, chunk: int
    ) -> None:
        self.prefixes = PrefixStore()
        self.hooks = AdapterHooks(model)
        self._run, self._shape, self._window = run, shape, window
        self._rows, self._kv_tokens, self._chunk = rows, kv_tokens, chunk
        self._computing: list[_S] = []
        self._slabs: dict[int, Slab[_S]] = {}
        self._running = 0
        self._graphs = DecodeGraphs.of(run, model, shape.device)
        self._crew = Crew(model)

    def __len__(self) -> int:
        return self._running

    @property
    def sequences(self) -> list[_S]:
        return self._computing + [s for slab in self._slabs.values() for s in slab.sequences]

    @property
    def held(self) -> int:
        """Number of tokens that running sequences have memory for."""
        slabs = sum(slab.capacity * slab.kv.shape[2] for slab in list(self._slabs.values()))
        return slabs + sum(s.buffer.shape[3] for s in list(self._computing) if s.buffer is not None)

    @property
    def has_room(self) -> bool:
        """Whether a prompt that starts now would be part of the next step."""
        waiting = sum(len(s.ids) - s.length for s in self._computing)
        return self._running < self._rows and waiting < self._room

    @property
    def _room(self) -> int:
        """Number of prompt tokens that the next step computes."""
        stalled = self._running > len(self._computing)
        return self._chunk if stalled else ALONE * self._chunk

    def fits(self, sequence: _S) -> bool:
        """Whether there is memory for its prompt beside the running sequences; always true if none runs."""
        room = self._kv_tokens - capacity_for(sequence.prompt + 1, self._window)
        if self.held > room:
            for slab in self._slabs.values():
                slab.compact()
        return not self._running or self.held <= room

    def begin(self, sequence: _S, adapter: Adapter | None, root: int) -> bool:
        """Start ``sequence`` with ``adapter``.

        Returns False if it should rather wait for the prompt of another sequence with the same prefix. Raises
        :class:`OutOfMemory`.
        """
        packed_ids = packed(sequence.ids)
        blocks = self.prefixes.match(root, packed_ids, sequence.prompt - 1)
        cached = BLOCK * len(blocks)
        for other in self._computing:
            if other.root == root and common_prefix(other.ids, sequence.ids) >= cached + WORTH_WAITING:
                return False
        capacity = capacity_for(sequence.prompt + 1, self._window)
        self.prefixes.trim(self._kv_tokens - self.held - capacity)
        buffer = self._with_memory(sequence, lambda: self._shape.buffer(capacity))
        for index, block in enumerate(blocks):
            buffer[:, :, :, index * BLOCK : (index + 1) * BLOCK].copy_(block)
        if adapter is not None:
            self.hooks.add(adapter)
        sequence.buffer, sequence.adapter, sequence.root = buffer, adapter, root
        sequence.length = sequence.cached = cached
        self._computing.append(sequence)
        self._running += 1
        return True

    def leave(self, sequence: _S, *, keep: bool = True) -> None:
        """Remove ``sequence``; with ``keep`` its keys and values go to the prefix cache."""
        if keep:
            self._publish(sequence)
        if sequence.slab is not None:
            sequence.slab.remove(sequence)
            sequence.slab = None
        else:
            self._computing.remove(sequence)
            sequence.buffer = None
        self._running -= 1
        self.prefixes.trim(self._kv_tokens - self.held)

    def close(self) -> None:
        """Free all memory."""
        self.prefixes.clear()
        self._slabs.clear()
        if self._graphs:
            self._graphs.clear()
        self._computing.clear()
        self._running = 0
        self.hooks.remove()
        self._crew.close()

    def release(self) -> None:
        """Free the memory of keys and values, but for rows with a CUDA graph. Only while no sequence runs."""
        self.prefixes.clear()
        self._slabs = {capacity: slab for capacity, slab in self._slabs.items() if slab.steady}

    def forget(self) -> None:
        """Clear keys and values, after a change of the weights. Only while no sequence runs."""
        self.release()
        # Damaged weights may have written NaNs.
        if self._graphs:
            self._graphs.check_weights()
        with torch.inference_mode():
            for slab in self._slabs.values():
                slab.kv.zero_()

    def step(self) -> list[tuple[_S, float]]:
        """Run one step. Returns the sequences that got a token (the last of their ``ids``), with its log-probability.

        Raises :class:`OutOfMemory`; then only the prefix cache has changed: it is empty.
        """
        self._make_places()
        passes = [planned for planned in self._plan() if planned.ids]
        if not passes:
            return []
        victim = self._computing[-1] if self._computing else max(self.sequences, key=lambda s: s.length)
        sampled = self._with_memory(victim, lambda: self._sampled(passes))
        for planned in passes:
            for sequence, count in planned.counts:
                sequence.length += count
        for sequence, token, _ in sampled:
            sequence.ids.append(token)
            sequence.number = sequence.uniform()
            if sequence.length == sequence.prompt:
                self._publish(sequence)  # others may be waiting for this prompt
        return [(sequence, logprob) for sequence, _, logprob in sampled]

    def _sampled(self, passes: list[_Step[_S]]) -> list[tuple[_S, int, float]]:
        """Each sequence that gets a token, with the token and its log-probability."""
        if len(passes) > 1 and not self._graphs:
            return [one for part in self._crew.map(lambda planned: self._sampled([planned]), passes) for one in part]
        logits = [self._logits(planned) for planned in passes]
        going = [sequence for planned in passes for sequence in planned.ending]
        if not going:
            return []
        tokens, logprobs = sample(
            torch.cat(logits) if len(logits) > 1 else logits[0],
            [s.temperature for s in going],
            [s.top_k for s in going],
            [s.top_p for s in going],
            [s.number for s in going],
        )
        return list(zip(going, tokens, logprobs, strict=True))

    def _logits(self, step: _Step[_S]) -> torch.Tensor:
        """(ending sequences, vocabulary)"""
        if self._graphs and step.slab is not None and not step.adapters:
            return self._graphs.logits(step.slab, step.ids, step.positions)
        device = self._shape.device
        with self.hooks.using(step.adapters, device):
            ids, places, ends = (torch.tensor(x, device=device) for x in (step.ids, step.positions, step.ends))
            return self._run(ids, places, ends.long(), Plan(step.parts))

    def _plan(self) -> list[_Step[_S]]:
        """Forward passes for everything: with graphs one for each steady slab, and for the rest one, or one for each
        thread."""
        passes: list[_Step[_S]] = []
        eager: list[Slab[_S]] = []
        for slab in self._slabs.values():
            if slab.sequences and slab.steady:
                passes.append(_Step(slab))
                passes[-1].add_rows(slab, 0, len(slab.sequences))
            elif slab.sequences:
                eager.append(slab)
        room = self._room
        prompts: list[tuple[_S, list[int], torch.Tensor]] = []
        for sequence in self._computing:
            ids = sequence.ids[sequence.length : sequence.length + room]
            if not ids or sequence.buffer is None:
                break
            room -= len(ids)
            prompts.append((sequence, ids, sequence.buffer))
        sizes = [len(ids) for _, ids, _ in prompts]
        tokens = sum(len(slab.sequences) for slab in eager) + sum(sizes)
        parts: list[_Step[_S]] = [_Step() for _ in range(self._crew.parts(tokens, max(sizes, default=1)))]
        share = math.ceil(tokens / len(parts))

        def least() -> _Step[_S]:
            return min(parts, key=lambda part: len(part.ids))

        for prompt in sorted(prompts, key=lambda prompt: -len(prompt[1])):
            least().add_prompt(*prompt)
        for slab in eager:
            first = 0
            while first < len(slab.sequences):
                part = least()
                count = min(share - len(part.ids), len(slab.sequences) - first)
                part.add_rows(slab, first, count)
                first += count
        return passes + parts

    def _make_places(self) -> None:
        """Move sequences that outgrew their place, or whose prompt is computed, to the slab where they fit."""
        for slab in list(self._slabs.values()):
            for sequence in [s for s in slab.sequences if s.length == slab.capacity]:
                self._join(sequence)
        for sequence in [s for s in self._computing if s.length >= s.prompt]:
            self._join(sequence)

    def _join(self, sequence: _S) -> None:
        """Move ``sequence`` from its buffer or slab to the slab where it fits."""
        capacity = capacity_for(sequence.length + 1, self._window)
        kv = sequence.kv

        def move() -> None:
            slab = self._slabs.get(capacity)
            if slab is None:
                # Rows that stay must not take the memory of others.
                steady = self._graphs is not None and 2 * capacity * self._rows <= self._kv_tokens
                slab = self._slabs[capacity] = Slab(self._shape, capacity, steady=steady)
            row = sequence.row
            slab.add(sequence, kv)
            if sequence.slab is None:
                self._computing.remove(sequence)
                sequence.buffer = None
            else:
                new, sequence.row = sequence.row, row
                sequence.slab.remove(sequence)
                sequence.row = new
            sequence.slab = slab

        self._with_memory(sequence, move)

    def _publish(self, sequence: _S) -> None:
        try:
            self.prefixes.add(sequence.root, packed(sequence.ids), sequence.kv, sequence.length)
        except Exception as error:
            if not _out_of_memory(error):
                raise
            self.prefixes.clear()

    def _with_memory(self, victim: _S, do: Callable[[], Any]) -> Any:
        """Call ``do()``; if memory is short, again without the prefix cache; then raise :class:`OutOfMemory`."""
        for last in (False, True):
            try:
                return do()
            except Exception as error:
                if not _out_of_memory(error):
                    raise
            self.prefixes.clear()
            for slab in self._slabs.values():
                if not slab.sequences:
                    slab.compact()
            if self._shape.device.type == "cuda":
                torch.cuda.empty_cache()
            if last:
                raise OutOfMemory(victim)
        raise AssertionError


class _Step(Generic[_S]):
    """The input of one forward pass."""

    def __init__(self, slab: Slab[_S] | None = None) -> None:
        self.slab = slab
        """If the pass decodes the rows of this slab only."""
        self.parts: list[Decode | Prefill] = []
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.counts: list[tuple[_S, int]] = []
        self.ending: list[_S] = []
        """The sequences whose next token is sampled; ``ends`` has the position of their last token in the step."""
        self.ends: list[int] = []
        self.adapters: dict[Adapter, list[int]] = {}

    def add_rows(self, slab: Slab[_S], first: int, count: int) -> None:
        """Add the last token of ``count`` rows of ``slab``, from ``first`` on."""
        rows, start = slab.sequences[first : first + count], len(self.ids)
        lengths = [s.length for s in rows]
        self.parts.append(Decode(slab, start, lengths, first))
        self.ids += [s.ids[-1] for s in rows]
        self.positions += lengths
        self.counts += [(s, 1) for s in rows]
        self.ending += rows
        self.ends += range(start, start + len(rows))
        for place, sequence in enumerate(rows, start):
            if sequence.adapter is not None:
                self.adapters.setdefault(sequence.adapter, []).append(place)

    def add_prompt(self, sequence: _S, ids: list[int], kv: torch.Tensor) -> None:
        """Add the next ``ids`` of a prompt."""
        start, begin = len(self.ids), sequence.length
        self.parts.append(Prefill(kv, begin, len(ids), start))
        self.ids += ids
        self.positions += range(begin, begin + len(ids))
        self.counts.append((sequence, len(ids)))
        if begin + len(ids) == len(sequence.ids):
            self.ending.append(sequence)
            self.ends.append(len(self.ids) - 1)
        if sequence.adapter is not None:
            self.adapters.setdefault(sequence.adapter, []).extend(range(start, len(self.ids)))


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "out of memory" in str(error))
