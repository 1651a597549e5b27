"""A language model that reads turns: hidden states, or the probability of the answer "yes".

Invariants: the text of a turn is data. Special tokens in it are encoded as plain text, and its length is bounded, in
characters before it is rendered and in tokens after that. Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from clawgym.errors import ClawGymError, EngineError
from clawgym.records.judge import Judgeable, Message
from clawgym.rewards._prompt import cut, text_of

__all__ = ["Reader"]

_FIRST, _LAST = 2, 24
"""Most messages: the first ones (system prompt and instruction) and the last ones."""
_TEXT, _CALLS = 4000, 8
"""Most characters of a text or of the arguments of a call; most calls of a message."""
_TOKENS = 8192
"""Most tokens of a forward pass, unless one turn has more."""
_ADAPTER = "adapter_config.json"
_QUESTION = "Did the last step bring the task closer to its goal? Answer yes or no."


class Reader:
    """Renders turns with the chat template of a model, as the policy's context is, and reads them with the model.

    ``model`` is the folder of a model, or of LoRA adapters.

    What is read ends with the results of the turn and the opening of the next reply. The model is cut after
    ``layer`` layers; None: it is used whole. Raises :class:`~clawgym.errors.ClawGymError` if the model cannot be used.
    """

    def __init__(
        self, model: Path, *, layer: int | None = None, context: int = 1024, device: str | None = None
    ) -> None:
        from clawgym.engines.folders import load_config
        from clawgym.gateway.render import Renderer

        self.folder, self._device = model, device
        config = load_config(_base_of(model)).get_text_config()
        if layer is not None and not 1 <= layer <= config.num_hidden_layers:
            raise EngineError(f"prm.layer={layer}: {model} has {config.num_hidden_layers} layers: choose one of them")
        self.size: int = config.hidden_size
        self._layer = layer
        self._context = min(context, config.max_position_embeddings)
        self._renderer = Renderer(model)
        self.yes, self.no = (self._renderer.encode(word)[0] for word in ("yes", "no"))
        """The ids of the two answers."""

    @cached_property
    def _model(self) -> Any:
        from clawgym.engines.load import load_model
        from clawgym.engines.lora import add_adapter, read_adapter

        made = load_model(_base_of(self.folder), self._device, None)
        if (self.folder / _ADAPTER).exists():
            add_adapter(made, read_adapter(self.folder, None, made))
        if self._layer is not None:
            made.base_model.layers = made.base_model.layers[: self._layer]
        return made.eval().requires_grad_(False)

    def ids(self, record: Judgeable, *, question: bool = False) -> tuple[int, ...]:
        """The ids of the turn, at most ``context``; of a longer one the start and the end.

        With ``question`` it ends by asking whether the turn helped. Raises :class:`~clawgym.errors.ClawGymError` if the
        template cannot render it.
        """
        history = [*record.history[:_FIRST], *record.history[_FIRST:][-_LAST:]]
        asked = [{"role": "user", "content": _QUESTION}] if question else []
        try:
            messages = [_bounded(m) for m in (*history, record.action, *record.after.messages[-_LAST:])]
            ids = self._rendered([*messages, *asked])
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ClawGymError(
                f"turn {record.turn} of {record.episode} cannot be rendered ({error!r}): leave it out"
            ) from error
        if len(ids) <= self._context:
            return ids
        start = self._context // 4
        return ids[:start] + ids[start - self._context :]

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        if self._renderer.call_parser is not None:
            try:
                return self._renderer.prompt(messages)
            except ClawGymError:  # such as a result whose call was left out
                pass
        return self._renderer.prompt(_plain(messages))

    def states(self, rows: Sequence[tuple[int, ...]]) -> np.ndarray:
        """(N, size) float32: the hidden state at the last token of each of ``rows`` of ids."""
        return self._read(rows).cpu().numpy()

    def probabilities(self, rows: Sequence[tuple[int, ...]]) -> np.ndarray:
        """(N,) float32: the probability of "yes", where "no" is the only other answer."""
        import torch

        with torch.inference_mode():
            head = self._model.get_output_embeddings()
            hidden = self._read(rows).to(head.weight.device, head.weight.dtype)
            logits = head(hidden)[:, [self.yes, self.no]].float()
        return logits.softmax(-1)[:, 0].cpu().numpy()

    def _read(self, rows: Sequence[tuple[int, ...]]) -> Any:
        """(N, size) float32. Rows that begin other rows, as the turns of one episode do, are read in these."""
        import torch

        found = torch.zeros(len(rows), self.size)
        inside = _hosts(rows)
        device = next(self._model.parameters()).device
        for part in _chunks(sorted(set(inside), key=lambda n: len(rows[n])), rows):
            width = max(len(rows[n]) for n in part)
            ids = torch.zeros(len(part), width, dtype=torch.long)
            seen = torch.zeros(len(part), width, dtype=torch.long)
            for at, n in enumerate(part):
                ids[at, : len(rows[n])] = torch.tensor(rows[n])
                seen[at, : len(rows[n])] = 1
            with torch.inference_mode():
                out = self._model.base_model(
                    input_ids=ids.to(device),
                    attention_mask=seen.to(device),
                    use_cache=False,
                )
            hidden = out.last_hidden_state
            where = {n: at for at, n in enumerate(part)}
            for n, host in enumerate(inside):
                if host in where:
                    found[n] = hidden[where[host], len(rows[n]) - 1].float().cpu()
        return found


def _base_of(folder: Path) -> Path:
    """``folder``, or the folder of the model that its LoRA adapters belong to."""
    from clawgym.engines.folders import model_folder, read_settings

    settings = folder / _ADAPTER
    if not settings.exists():
        return model_folder(folder)
    base = read_settings(settings).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise EngineError(f"{settings}: base_model_name_or_path: names no model: put its folder there")
    return model_folder(base)


def _bounded(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message["role"], "content": cut(text_of(message), _TEXT)}
    if message.get("tool_call_id"):
        found["tool_call_id"] = message["tool_call_id"]
    calls = []
    for call in (message.get("tool_calls") or ())[:_CALLS]:
        function = call.get("function") or {}
        said = {"name": str(function.get("name"))[:100], "arguments": cut(str(function.get("arguments")), _TEXT)}
        calls.append({"id": str(call.get("id"))[:100], "type": "function", "function": said})
    return found | ({"tool_calls": calls} if calls else {})


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same with texts of users and the assistant only, in turn: every chat template renders these."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"] if message["role"] in ("system", "assistant") else "user"
        calls = [f"call {c['function']['name']} {c['function']['arguments']}" for c in message.get("tool_calls") or ()]
        text = "\n".join(filter(None, [message["content"], *calls]))
        if found and found[-1]["role"] == role:
            found[-1]["content"] += f"\n\n{text}"
        else:
            found.append({"role": role, "content": text})
    return found


def _hosts(rows: Sequence[tuple[int, ...]]) -> list[int]:
    """For each row, the index of a row that begins with it (maybe its own)."""
    order = sorted(range(len(rows)), key=lambda n: rows[n])
    hosts = list(range(len(rows)))
    for n, after in reversed(list(pairwise(order))):
        if rows[hosts[after]][: len(rows[n])] == rows[n]:
            hosts[n] = hosts[after]
    return hosts


def _chunks(order: Sequence[int], rows: Sequence[tuple[int, ...]]) -> Iterator[list[int]]:
    part: list[int] = []
    for n in order:
        if part and (len(part) + 1) * len(rows[n]) > _TOKENS:
            yield part
            part = []
        part.append(n)
    if part:
        yield part
