"""Properties of parts of the transformers engine: sampling a token, and the prefix cache."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from clawgym.engines._prefix import BLOCK, PrefixStore, packed  # noqa: E402
from clawgym.engines._sample import sample  # noqa: E402
from clawgym.engines._slots import KVShape  # noqa: E402

LOGITS = st.lists(st.sampled_from([-math.inf, -30.0, -2.0, 0.0, 0.1, 1.5, 4.0, 20.0]), min_size=2, max_size=9).filter(
    lambda row: max(row) > -math.inf
)


def chosen(row: list[float], uniforms: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    """The ids and log-probs that ``uniforms`` choose from one row."""
    n = len(uniforms)
    return sample(torch.tensor([row] * n), [temperature] * n, [top_k] * n, [top_p] * n, uniforms)


def softmax(row: list[float], temperature: float) -> list[float]:
    weights = [math.exp((x - max(row)) / temperature) for x in row]
    return [w / sum(weights) for w in weights]


@settings(deadline=None)
@given(row=LOGITS, temperature=st.sampled_from([0.3, 1.0, 3.0]))
def test_sampled_frequencies_match_probabilities(row: list[float], temperature: float) -> None:
    count = 500
    grid = [(i + 0.5) / count for i in range(count)]
    ids, logprobs = chosen(row, grid, temperature=temperature)
    want = softmax(row, temperature)
    for token, share in enumerate(want):
        assert abs(ids.count(token) / count - share) <= 2 / count
    for token, logprob in zip(ids, logprobs, strict=True):
        assert logprob == pytest.approx(math.log(want[token]), abs=1e-4)


@settings(deadline=None)
@given(row=LOGITS, top_k=st.integers(0, 9), top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]))
def test_top_k_and_top_p_keep_only_the_most_likely_ids(row: list[float], top_k: int, top_p: float) -> None:
    want = softmax(row, 1.0)
    order = sorted(range(len(row)), key=lambda i: -want[i])
    kept = order[: top_k or len(row)]
    mass = sum(want[i] for i in kept)
    few = [i for n, i in enumerate(kept) if n == 0 or sum(want[j] for j in kept[:n]) < top_p * mass - 1e-6]
    likely = {want[i] for i in few}  # equals may stand for each other
    ids, logprobs = chosen(row, [(i + 0.5) / 300 for i in range(300)], top_k=top_k, top_p=top_p)
    assert len(set(ids)) <= len(few) + 1  # a sum that lands on the border may round either way
    for token, logprob in zip(ids, logprobs, strict=True):
        assert logprob == pytest.approx(math.log(want[token]), abs=1e-4)  # of the whole vocabulary
        assert want[token] >= min(likely) - 1e-6


@settings(deadline=None)
@given(
    size=st.sampled_from([7, 500, 1025, 3000]),
    seed=st.integers(0, 1000),
    different=st.sampled_from([2, 40, 10_000]),
    cuts=st.lists(st.tuples(st.sampled_from([0, 1, 5, 400, 2000]), st.sampled_from([0.1, 0.6, 0.97])), min_size=1),
)
def test_of_equal_logits_top_k_and_top_p_keep_those_of_lower_ids(
    size: int, seed: int, different: int, cuts: list[tuple[int, float]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(different, (size,), generator=generator) / different * 8
    weights, order = row.double().exp().sort(descending=True, stable=True)
    ids, _ = sample(row.repeat(len(cuts), 1), [1.0] * len(cuts), *zip(*cuts, strict=True), [1 - 2**-53] * len(cuts))
    for (top_k, top_p), token in zip(cuts, ids, strict=True):
        running = weights[: top_k or None].cumsum(-1)
        most = int((running < top_p * running[-1]).sum()) + 1
        # The last of those that are kept, but for a sum that rounding brings across the border.
        assert any(token == int(order[:count].max()) for count in (most - 1, most, most + 1) if count)


@given(row=LOGITS, top_k=st.integers(0, 3))
def test_the_ends_of_the_interval(row: list[float], top_k: int) -> None:
    ids, logprobs = chosen(row, [0.0, 1 - 2**-53], top_k=top_k)
    assert all(row[i] > -math.inf for i in ids)
    assert all(math.isfinite(x) for x in logprobs)


@given(row=LOGITS, uniform=st.floats(0, 1, exclude_max=True))
def test_temperature_0_takes_the_likeliest(row: list[float], uniform: float) -> None:
    (token,), (logprob,) = chosen(row, [uniform], temperature=0.0, top_k=2)
    assert row[token] == max(row)
    assert logprob == pytest.approx(math.log(softmax(row, 1.0)[token]), abs=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_logits_give_nan_log_probs(bad: float) -> None:
    _, logprobs = sample(torch.tensor([[0.0, bad], [0.0, 1.0]]), [1.0, 1.0], [0, 0], [1.0, 1.0], [0.5, 0.5])
    assert math.isnan(logprobs[0])
    assert math.isfinite(logprobs[1])


def test_rare_ids_of_a_large_vocabulary_are_reached() -> None:
    size = 200_000
    row = torch.zeros(1, size)
    row[0, 0] = 12.0
    weight = math.exp(12)
    for token in (1, 77_777, size - 1):
        uniform = (weight + token - 0.5) / (weight + size - 1)
        ids, _ = sample(row, [1.0], [0], [1.0], [uniform])
        assert ids == [token]


@settings(deadline=None)
@given(
    size=st.sampled_from([2, 63, 64, 65, 128, 500, 1023, 1024, 1025, 3000]),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 1.0, 10.0, 60.0]),
    impossible=st.sampled_from([0.0, 0.5, 0.99]),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
)
def test_the_id_is_where_the_running_sum_exceeds_the_number(
    size: int, seed: int, scale: float, impossible: float, uniform: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = scale * torch.randn(size, generator=generator)
    row[1:][torch.rand(size - 1, generator=generator) < impossible] = -math.inf
    (token,), (logprob,) = sample(row[None], [1.0], [0], [1.0], [uniform])
    weights = row.double().softmax(-1)
    running = weights.cumsum(-1)
    assert weights[token] > 0
    assert running[token] - weights[token] - 1e-6 <= uniform <= running[token] + 1e-6
    assert logprob == pytest.approx(float(weights[token].log()), abs=1e-4)


def test_rows_do_not_mix() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 50)
    temperature, top_k, top_p = [0.0, 1.0, 0.5, 1.0, 2.0, 1.0], [0, 3, 0, 0, 7, 0], [1.0, 1.0, 0.4, 1.0, 0.9, 1.0]
    uniform = [0.1, 0.9, 0.5, 0.3, 0.7, 0.99]
    ids, logprobs = sample(rows, temperature, top_k, top_p, uniform)
    for i in range(6):
        alone = sample(rows[i : i + 1], temperature[i : i + 1], top_k[i : i + 1], top_p[i : i + 1], uniform[i : i + 1])
        assert alone == ([ids[i]], [pytest.approx(logprobs[i], abs=1e-6)])


# Prefixes


def keys_of(ids: list[int], root: int) -> Any:
    """A stand-in for keys and values, (1, 2, 1, T, 1), that tells from which ids and weights it came."""
    running = list(itertools.accumulate(ids, lambda a, b: (31 * a + b) % 9973, initial=root))[1:]
    return torch.tensor(running, dtype=torch.float64)[None, None, None, :, None].expand(1, 2, 1, -1, 1)


PARTS = [[n] * k for n, k in ((1, 5), (2, 16), (3, 16), (2, 40), (4, 33))]
SEQUENCE = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(lambda parts: [i for p in parts for i in p])
ACTION = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 1), SEQUENCE),
    st.tuples(st.just("match"), st.integers(0, 1), SEQUENCE),
    st.tuples(st.just("trim"), st.integers(0, 200), st.none()),
    st.tuples(st.just("drop"), st.integers(0, 1), st.none()),
)


@settings(deadline=None, max_examples=200)
@given(actions=st.lists(ACTION, max_size=25))
def test_cached_blocks_were_computed_from_the_same_ids(actions: list[Any]) -> None:
    store = PrefixStore()
    roots = [store.root(), store.root()]
    added: list[tuple[int, list[int]]] = []
    for kind, number, ids in actions:
        if kind == "add":
            root = roots[number]
            store.add(root, packed(ids), keys_of(ids, root), len(ids))
            added.append((number, ids))
            assert len(store.match(root, packed(ids), len(ids))) == len(ids) // BLOCK
        elif kind == "match":
            blocks = store.match(roots[number], packed(ids), len(ids))
            if blocks:
                found = torch.cat(blocks, 3)
                assert torch.equal(found, keys_of(ids, roots[number])[:, :, :, : found.shape[3]])
            assert len(store.match(roots[number], packed(ids), 20)) <= 1
        elif kind == "trim":
            store.trim(number)
            assert store.tokens <= number
        else:
            store.drop(roots[number])
            added = [(n, ids) for n, ids in added if n != number]
        # Nothing is kept that cannot be found, and nothing is kept twice.
        reachable = {block.data_ptr() for n, ids in added for block in store.match(roots[n], packed(ids), len(ids))}
        assert BLOCK * len(reachable) == store.tokens


def test_most_recently_used_blocks_are_kept() -> None:
    store = PrefixStore()
    root = store.root()
    common, left, right = [1] * 64, [2] * 32, [3] * 32
    for tail in (left, right):
        store.add(root, packed(common + tail), keys_of(common + tail, root), 96)
    assert store.tokens == 128  # branches share what they have in common
    store.match(root, packed(common + left), 96)
    store.trim(96)
    assert len(store.match(root, packed(common + left), 96)) == 6
    assert len(store.match(root, packed(common + right), 96)) == 4


def test_the_memory_of_a_token_is_what_a_buffer_takes_of_it() -> None:
    shape = KVShape(3, 2, 8, torch.bfloat16, torch.device("cpu"))
    assert shape.token_bytes == shape.buffer(1).nbytes == 3 * 2 * 2 * 8 * 2
