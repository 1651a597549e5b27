"""Streamed text, joined, equals the decoding of all ids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from clawgym.gateway.decode import Alphabet, Decoder

from .models import CHATML, write_model


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def alphabet(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("m") / "m"
    write_model(folder, CHATML, sentencepiece=request.param == "sentencepiece")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    hidden = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    return Alphabet(tokenizer, frozenset(hidden))


def pieces(alphabet, ids, seed):
    rng, decoder, out, at = random.Random(seed), Decoder(alphabet), [], 0
    while at < len(ids):
        n = rng.randint(1, 3)
        out.append(decoder.push(ids[at : at + n]))
        at += n
    return [*out, decoder.finish()]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_joined_text_equals_decoding_of_all_ids(alphabet, data, seed):
    size = alphabet.tokenizer.get_vocab_size()
    some = st.integers(0, size - 1) | st.integers(0, 12) | st.integers(size - 300, size + 3)
    ids = data.draw(st.lists(some, max_size=30))
    assert "".join(pieces(alphabet, ids, seed)) == alphabet.text(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])), seed=st.integers(0, 99))
def test_any_text_round_trip(alphabet, text, seed):
    ids = alphabet.tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(alphabet, ids, seed)) == alphabet.text(ids)


@settings(max_examples=200, deadline=None)
@given(raw=st.lists(st.sampled_from(b"\x41\x80\xbf\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\xff\xed\xa0"), max_size=20))
def test_invalid_bytes_give_replacement_characters(alphabet, raw):
    ids = [id_of(alphabet, byte) for byte in raw]
    assert "".join(pieces(alphabet, ids, 0)) == alphabet.text(ids)
    assert "".join(pieces(alphabet, ids * 3, 1)) == alphabet.text(ids * 3)


def id_of(alphabet, byte):
    """The id of a single byte: its fallback token, or its character in the byte-level alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    sign = chr(byte if byte in printable else 256 + others.index(byte))
    return alphabet.tokenizer.token_to_id(f"<0x{byte:02X}>" if alphabet.bytes_ids else sign)


def test_text_is_returned_once_certain(alphabet):
    ids = alphabet.tokenizer.encode("the file 😀 and", add_special_tokens=False).ids
    decoder, told = Decoder(alphabet), ""
    for token in ids:
        told += decoder.push([token])
        assert "�" not in told
    assert told == "the file 😀 and"
    assert decoder.finish() == ""


def test_turn_end_is_hidden_and_markers_are_text(alphabet):
    encode = alphabet.tokenizer.encode
    ids = encode("<think>a</think>b<tool_call>c<|im_end|>d<|endoftext|>", add_special_tokens=False).ids
    assert alphabet.text(ids).replace(" ", "") == "<think>a</think>b<tool_call>cd"


def test_incomplete_character_is_returned_at_end(alphabet):
    ids = alphabet.tokenizer.encode("a😀", add_special_tokens=False).ids[:-1]
    decoder = Decoder(alphabet)
    assert decoder.push(ids).strip() == "a"
    assert set(decoder.finish()) == {"�"}
    assert decoder.finish() == ""


def test_noise_is_returned_while_streamed(alphabet):
    broken = [id_of(alphabet, 0xF0)] * 2000
    decoder = Decoder(alphabet)
    told = "".join(decoder.push([token]) for token in broken)
    assert len(told) >= 1990 or alphabet.bytes_ids, "only runs of fallback bytes wait for their end"
    assert told + decoder.finish() == "�" * 2000 == alphabet.text(broken)


def test_tokenizer_without_decoder():
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "<0x41>": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    plain = Alphabet(tokenizer)
    assert plain.bytes_ids == frozenset()
    assert "".join(pieces(plain, [0, 2, 1, 1], 0)) == plain.text([0, 2, 1, 1]) == "a <0x41> b b"
