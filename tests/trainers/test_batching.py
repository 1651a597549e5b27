"""Packing of training sequences: results equal those of single sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.engines.tiny import make_tiny_model
from clawgym.trainers.batching import MaskedSequence, MicroBatch, Packed, micro_batches, pack
from clawgym.trainers.common.policy import token_logprobs


@st.composite
def paths(draw: st.DrawFn) -> list[MaskedSequence]:
    """Sequences over few ids, so that many share prefixes; some are equal, some are prefixes of others."""
    count = draw(st.integers(1, 8))
    made = []
    for _ in range(count):
        ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
        if made and draw(st.booleans()):
            ids = [*draw(st.sampled_from(made)).ids[: draw(st.integers(0, 12))], *ids]
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        made.append(MaskedSequence(tuple(ids), tuple(mask)))
    return made


def along(row: Packed, place: int) -> list[int]:
    """The ids that the token at ``place`` attends to, in order."""
    return [int(row.ids[n]) for n in row.seen()[place].nonzero()[0]]


@given(paths(), st.integers(1, 40), st.booleans())
@settings(max_examples=300)
def test_token_attends_to_its_own_sequence_only(made: list[MaskedSequence], row_tokens: int, share: bool) -> None:
    rows = pack(made, row_tokens=row_tokens, share=share)
    wanted = {}  # place of a trained token -> (what comes before it, itself)
    place = 0
    for path in made:
        for at, trained in enumerate(path.mask):
            if trained:
                wanted[place] = list(path.ids[:at]), path.ids[at]
                place += 1
    found = {
        int(place): (along(row, int(before)), int(target))
        for row in rows
        for before, target, place in zip(row.predicts, row.targets, row.places, strict=True)
    }
    assert found == wanted
    for row in rows:
        assert row.positions.tolist() == [len(along(row, n)) - 1 for n in range(len(row.ids))]
        assert not share or len(row.ids) <= max(row_tokens, max(len(path.ids) for path in made))


@given(paths())
def test_row_equals_loops_over_tokens(made: list[MaskedSequence]) -> None:
    opening = tuple(range(100, 200))  # long enough to share a row
    made = [MaskedSequence(opening + path.ids, (0,) * 100 + path.mask) for path in made]
    (row,) = pack(made, row_tokens=10**6)
    ids, positions, predicts, targets, places, attach = [], [], [], [], [], []
    last: tuple[int, ...] = ()
    where: list[int] = []
    for number in sorted(range(len(made)), key=lambda n: made[n].ids):
        path, first = made[number], sum(sum(other.mask) for other in made[:number])
        shared = 0
        while shared < min(len(last), len(path.ids)) and last[shared] == path.ids[shared]:
            shared += 1
        where, start = where[:shared], len(ids)
        for at in range(shared, len(path.ids)):
            where.append(len(ids))
            ids.append(path.ids[at])
            positions.append(at)
        if len(ids) > start:
            attach.append((start, len(ids), where[shared - 1] if shared else -1))
        for at, trained in enumerate(path.mask):
            if trained:
                predicts.append(where[at - 1])
                targets.append(path.ids[at])
                places.append(first + sum(path.mask[:at]))
        last = path.ids
    assert row.attach == tuple(attach)
    for name, wanted in (
        ("ids", ids), ("positions", positions), ("predicts", predicts), ("targets", targets), ("places", places)
    ):  # fmt: skip
        assert getattr(row, name).dtype == "int64"
        assert getattr(row, name).tolist() == wanted


@given(paths())
def test_shared_prefix_is_stored_once(made: list[MaskedSequence]) -> None:
    opening = tuple(range(100, 200))  # long enough to share a row
    made = [MaskedSequence(opening + path.ids, (0,) * 100 + path.mask) for path in made]
    (row,) = pack(made, row_tokens=10**6)
    beginnings = {path.ids[:n] for path in made for n in range(1, len(path.ids) + 1)}
    assert len(row.ids) == len(beginnings)


@pytest.mark.parametrize(("shared", "own", "rows"), [(0, 50, 16), (10, 300, 16), (600, 32, 1), (200, 100, 2)])
def test_sequence_joins_row_only_if_cheaper(shared: int, own: int, rows: int) -> None:
    """Unrelated sequences in one row would make attention slower without saving anything."""
    made = [
        MaskedSequence((*range(shared), *range(at, at + own)), (0,) * (shared + own)) for at in range(1000, 17000, 1000)
    ]
    assert len(pack(made, row_tokens=10**6)) == rows


@given(paths(), st.integers(1, 30), st.integers(1, 90))
def test_micro_batches_contain_each_row_once(made: list[MaskedSequence], row_tokens: int, tokens: int) -> None:
    rows = pack(made, row_tokens=row_tokens)
    batches = list(micro_batches(rows, tokens=tokens))
    assert sorted(n for batch in batches for n in batch.places.tolist()) == list(range(sum(sum(p.mask) for p in made)))
    for batch in batches:
        assert batch.ids.numel() <= tokens or len(batch.ids) == 1
        assert batch.seen is None or batch.seen.diagonal(dim1=-2, dim2=-1).all()
    assert sum(batch.ids.numel() for batch in batches) <= 2 * sum(len(row.ids) for row in rows)


@given(paths(), st.integers(1, 30), st.integers(1, 90))
def test_no_sequence_is_split_between_micro_batches(made: list[MaskedSequence], row_tokens: int, tokens: int) -> None:
    """Losses of whole sequences, such as ``gspo``, need all trained tokens of a sequence at once."""
    sequence = torch.tensor([n for n, path in enumerate(made) for _ in range(sum(path.mask))], dtype=torch.long)
    batches = list(micro_batches(pack(made, row_tokens=row_tokens), tokens=tokens))
    found = [n for batch in batches for n in sequence[batch.places].unique().tolist()]
    assert sorted(found) == sequence.unique().tolist()


def test_sequence_that_trains_first_id_raises() -> None:
    with pytest.raises(ValueError, match=r"sequence 1: .* leave it out"):
        pack([MaskedSequence((1, 2), (0, 1)), MaskedSequence((1, 2), (1, 1))], row_tokens=8)


def test_packed_logprobs_match_single_sequences(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(9, 700, (count,), generator=generator).tolist())

    opening, task = some(30), some(9)
    rows = [opening + task + some(n) for n in (3, 17, 5, 40)]
    made = [MaskedSequence(ids, (0,) * 20 + (1,) * (len(ids) - 20)) for ids in rows] + [
        MaskedSequence(some(25), (0,) * 5 + (1,) * 20)
    ]
    alone = torch.cat([_plain(model, path) for path in made])
    for share, row_tokens, tokens in ((True, 64, 128), (True, 4096, 4096), (False, 1, 100)):
        together = torch.zeros_like(alone)
        for micro in micro_batches(pack(made, row_tokens=row_tokens, share=share), tokens=tokens):
            together[micro.places] = token_logprobs(model, micro)[0].detach()
        assert (together - alone).abs().max() < 1e-5


def _plain(model: torch.nn.Module, path: MaskedSequence) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([path.ids])).logits[0, :-1]
    logp = logits.log_softmax(-1).gather(1, torch.tensor(path.ids[1:])[:, None])[:, 0]
    return logp[torch.tensor(path.mask[1:]).bool()]


def test_chunked_logits_give_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clawgym.trainers.common import policy

    model = transformers.AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model"), dtype=torch.float32)
    (micro,) = micro_batches(pack([MaskedSequence(tuple(range(20, 60)), (0,) + (1,) * 39)], row_tokens=64), tokens=64)

    def gradient(most: int) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(policy, "MAX_LOGITS", most)
        model.zero_grad()
        logp, entropy = token_logprobs(model, micro, temperature=0.7)
        logp.sum().backward()
        return torch.cat([logp.detach(), entropy]), model.model.layers[0].mlp.up_proj.weight.grad.clone()

    for a, b in zip(gradient(2**24), gradient(704 * 7), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_micro_batch_moves_all_tensors() -> None:
    (micro,) = micro_batches(
        pack([MaskedSequence((1, 2, 3), (0, 1, 1)), MaskedSequence((1, 2, 4), (0, 0, 1))], row_tokens=8), tokens=8
    )
    assert isinstance(micro, MicroBatch)
    moved = micro.to("cpu")
    assert moved.seen is not None
    assert torch.equal(moved.predicts, micro.predicts)
