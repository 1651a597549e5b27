"""What looks like a secret is found before an upload, and taken out of what is stored."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.credentials import find_secrets, without_secrets

pytest.importorskip("detect_secrets")


@given(
    st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789", min_size=24, max_size=40), st.sampled_from(["{}", "x={}"])
)
def test_tokens_are_found_anywhere(tail: str, around: str) -> None:
    text = f"first\n{around.format('hf_' + tail)}\nlast"
    (found,) = find_secrets("notes.txt", text)
    assert found == "notes.txt, line 2: looks like a Hugging Face token"


@given(
    st.dictionaries(st.sampled_from(["eos_token", "tokenizer_class", "hash", "lr", "max_tokens"]), st.text(max_size=15))
)
def test_ordinary_settings_are_no_secrets(settings: dict[str, str]) -> None:
    assert find_secrets("config.json", json.dumps(settings)) == []
    assert (
        find_secrets("a.json", json.dumps({"hash": "0f3a9c1b" * 8, "api_key": "[removed]", "token": "<|endoftext|>"}))
        == []
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sk_live_" + "a1" * 12, "Stripe Access Key"),
        ("glpat-" + "Ab3" * 8, "GitLab Token"),
        ("pypi-AgEIcHlwaS5vcmc" + "Ab3_" * 20, "PyPI Token"),
    ],
)
def test_tokens_that_detect_secrets_knows_are_found(text: str, kind: str) -> None:
    assert find_secrets("a.md", f"one\ntwo {text}") == [f"a.md, line 2: looks like a secret ({kind})"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("key sk-abcdefghijkl.", "key [removed]."),
        ("key sk-ab***yz.", "key [removed]."),
        ("https://me:pw@host/v1", "https://[removed]host/v1"),
        ("Bearer abc", "[removed]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- rest", "[removed] rest"),
        ("AIza" + "Ab3_x" * 7, "[removed]"),
        ("the model sk-small", "the model sk-small"),
    ],
)
def test_secrets_are_taken_out(text: str, kept: str) -> None:
    assert without_secrets(text) == kept


def test_values_of_secret_names_are_taken_out() -> None:
    assert without_secrets("x", "OPENAI_API_KEY") == without_secrets("x", "auth_token") == "[removed]"
    assert without_secrets("x", "max_tokens") == "x"


def test_taking_out_imports_no_packages() -> None:
    code = "import sys; from clawgym.credentials import *; without_secrets('x'); print('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
