"""Secrets and personal data are replaced in what is stored, ordinary texts of agents stay, and the time is bounded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.errors import MissingDependency
from clawgym.online.redaction import Redactor
from clawgym.pool.sequences import sequences_of
from clawgym.records import Turn

pytest.importorskip("detect_secrets")
pytest.importorskip("phonenumbers")

REDACTOR = Redactor()
PEM = (
    "-----BEGIN RSA PRIVATE KEY-----\n"
    + "MIIEowIBAAKCAQEA0Z3VS5JJcds3xfn/ygWyF8PbnGy0AHB7\n" * 4
    + "-----END RSA PRIVATE KEY-----"
)
KEY = "a8f5f167f44f4964e6c998dee827110c"

TAKEN = [
    ("my mail is jane.doe@gmail.com.", "my mail is <EMAIL_ADDRESS>."),
    ("Max <max+spam@uni-ulm.de>, eva@firma.co.uk", "Max <<EMAIL_ADDRESS>>, <EMAIL_ADDRESS>"),
    ("mailto:max@muster.de?subject=x", "mailto:<EMAIL_ADDRESS>?subject=x"),
    ("call me at 415.555.2671 or (415) 555-2671", "call me at <PHONE_NUMBER> or <PHONE_NUMBER>"),
    ("+49 (0)30 1234567, +44.20.7946.0958", "<PHONE_NUMBER>, <PHONE_NUMBER>"),
    ('"home_phone": "06 12 34 56 78"', '"home_phone": "<PHONE_NUMBER>"'),
    ("Telefon 030 1234567", "Telefon <PHONE_NUMBER>"),
    ("4111 1111 1111 1111, exp 12/29", "<CREDIT_CARD>, exp 12/29"),
    ("5555-5555-5555-4444 378282246310005", "<CREDIT_CARD> <CREDIT_CARD>"),
    ("to DE89 3704 0044 0532 0130 00 2 days ago", "to <IBAN_CODE> 2 days ago"),
    ("AB12 GB82WEST12345698765432", "AB12 <IBAN_CODE>"),
    ("219-09-9998, SSN: 536904399", "<US_SSN>, SSN: <US_SSN>"),
    ("from 93.184.216.34:8080 and 2a00:1450:4001:81b::200e", "from <IP_ADDRESS>:8080 and <IP_ADDRESS>"),
    ("ssh root@93.184.216.34", "ssh root@<IP_ADDRESS>"),
    ("pay 1BvBMSEYstWetqTFn5Au4m4GFg7xJaNVN2", "pay <CRYPTO>"),
    ("id AKIAQ3EGRIWZZKQ7MNBV", "id <SECRET>"),
    ("aws_secret_access_key = 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", "aws_secret_access_key = <SECRET>"),
    ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "<SECRET>"),
    ("sk_live_51H8xK2eZvKYlo2CqT9wB7nF4pRs6dUi0", "<SECRET>"),
    ("OPENAI_API_KEY=sk-proj-aB3dE5fG7hI9jK1lM3nO5pQ7", "OPENAI_API_KEY=<SECRET>"),
    (f"Authorization: Bearer {KEY}", "Authorization: Bearer <SECRET>"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJqYW5lIn0x.dozjgNryP4J3jVmNHl0w5N", "<SECRET>"),
    (f"here:\n{PEM}\nbye", "here:\n<SECRET>\nbye"),
    (PEM.replace("\n", "\\n") + "\\n", "<SECRET>\\n"),
    (f"?page=2&api_key={KEY}&x=1", "?page=2&api_key=<SECRET>&x=1"),
    ("clientSecret: 'x7Kp2mQ9vR4tYb8s'", "clientSecret: '<SECRET>'"),
    ("the password for the admin account is tr0ub4dor&3.", "the password for the admin account is <SECRET>."),
    ("**Password:** hunter22", "**Password:** <SECRET>"),
    ("Das Passwort ist Sommer2024!", "Das Passwort ist <SECRET>!"),
    (r"{\"password\": \"hunter22\"", r"{\"password\": \"<SECRET>\""),
    ("| password | hunter22 |", "| password | <SECRET> |"),
    ("<password>hunter22</password>", "<password><SECRET></password>"),
    ("login --password hunter22 --force", "login --password <SECRET> --force"),
    ("curl -u alice:Pa55w0rd! https://x.org", "curl -u alice:<SECRET> https://x.org"),
    ("postgres://app:q8Zt3rWx@db.prod.net:5432/x", "postgres://app:<SECRET>@db.prod.net:5432/x"),
    # What people write without any intention to hide it.
    ("jane\u200b.doe@\u200bgmail.com", "<EMAIL_ADDRESS>"),
    ("415\u2011555\u20112671", "<PHONE_NUMBER>"),
    ("+49\u00a030\u00a01234567", "<PHONE_NUMBER>"),
    ("ｊａｎｅ＠ｇｍａｉｌ．ｃｏｍ", "<EMAIL_ADDRESS>"),
    (r"first\njane.doe@gmail.com\nlast", r"first\n<EMAIL_ADDRESS>\nlast"),
]

KEPT = [
    "commit 2061273a1b0c4d5e6f708192a3b4c5d6e7f80910 by HEAD~3, tree d2d9bb9",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "session 550e8400-e29b-41d4-a716-446655440000 call_9f8e7d6c5b4a39281706f5e4",
    "/usr/lib/python3.11/site-packages/numpy/core/_methods.py:47: RuntimeWarning",
    r"C:\Users\new\tests\report.txt",
    "version 1.2.3.4, v10.99.120.3, numpy==2.4.6, Chrome/120.0.6099.109, libfoo-1.98.2.44.tar.gz, section 8.2.4.45",
    "listening on 127.0.0.1:8080, 0.0.0.0, [::1]:443, 10.0.0.5, 192.168.1.20, 172.16.0.1, 169.254.169.254, 8.8.8.8",
    "192.0.2.10, 198.51.100.7, 203.0.113.99, 2001:db8::1, fe80::1, std::vector, 12:30:45",
    "2024-01-15T10:30:00.123456Z 1700000000 1700000000123 1700000000123456 20240115103000",
    "@@ -12,7 +12,9 @@ lines 120-145, exit code 137, port 65535, 1,234,567.89 bytes, 0.4111111111111111",
    "+2024-01-15 10:00\n+35236450.6\n+1 2 3\n- 4 5 6",
    "order 4929-1234-5678-9012, invoice 2024-0012345, ticket 123456789, tracking 1Z999AA10123456784",
    "4532 1234 5678 9012 3456 7890",
    "4111111111111112 is not a card, 1234567890123456 neither",
    "jane@example.com, bob@corp.example, root@localhost, x@y.local, you@gmail.com, noreply@github.com",
    "git clone git@github.com:owner/repo.git && npm i left-pad@1.3.0 @scope/pkg@2.0.0",
    "@app.route('/x')\nA@np.linalg.inv(B) + x@self.weight.T, icon@2x.png, getty@tty1.service, foo-bar@baz.py",
    "tel: see the docs, 555-0142, +1 415 555 0123, mobile: 1920x1080",
    "max_tokens: 4096, next_page_token=CAUQAA5x7Kp2mQ9vR4tYb8s, eos_token: <|endoftext|>, tokenizer: gpt2-medium-v2",
    "token = get_token(user1)\npassword = os.environ['DB_PASSWORD']\nsecret: ${SECRET_KEY}\napi_key=<your-api-key>",
    "password: str\npassword=None, password: ********, password123, password is stored as SHA-256 hash",
    "tokens: senderE164Tokens, privateKeyBase64: summary.decryptionKeyBase64, token: /tmp/clawgym-k8p63yfr/a.token",
    "PWD=/home/user1/project2, Enter the password: at least 8-characters",
    "password_hash=5f4dcc3b5aa765d61d8327deb882cf99",
    "AKIAIOSFODNN7EXAMPLE, ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "sk-your-api-key-goes-here, sk-estimator-checks-for-all",
    "postgres://postgres:postgres@localhost:5432/app",
    "https://user:password@host/, proxy: socks5://<user>:<password>@host:1",
    'if "-----BEGIN PRIVATE KEY-----" in text: raise ValueError("no key, please")',
    "ACCAGATTACAGATTACAGATTACA MSKAKIALLNPQRSTVWYACDEFG",
    "AC" + "d" * 32,
    "| id | name |\n| 1001 | Fox |\n| 1002 | Owl |\nIBAN DE00 0000 0000 0000 0000 00",
    "1 + 1 = 2; f(x) = 3.14159265358979; range(1000000000); 0xdeadbeefcafebabe; #ff8800; 1e-12",
    "1BvBMSEYstWetqTFn5Au4m4GFg7xJaNVN3 has a wrong checksum",
    "Zeile 1\u00a0: 3\u202f000\u202f000 €, emoji 👩‍👩‍👧, naïve",
]

HOSTILE = [
    *("1", "4111 ", "4111 1111 1111 1111 ", "1-", "1.", "12 ", "@", "a@", "a.", "@a.", "@b.com", "x@b.com "),
    *("-----BEGIN", "-----BEGIN PRIVATE KEY-----", "-----BEGIN RSA PRIVATE KEY-----\n" + "A" * 30, "AKIA", "sk-"),
    *("eyJ", "-eyJaaaaaaaaaa", "-eyJaaaaaaaaaa.eyJaaaaaaaaaa", "://", "://a:", "://a:b@", "curl -u a:", "glagent-"),
    *("password", "password=", 'password"', "password a b c d ", "token=", "secret-", f"api_key={KEY} ", "bearer "),
    *("+4", "+49 1512 3456789 ", "415-555-2671 ", "phone: 030 1234567 ", "ssn:", "DE89", "DE89 ", "93.184.216.34 "),
    *("2a00:", "1BvBMSEYstWetqTFn5Au4m4GFg7xJaNVN2 ", "xoxb-1-", "aws key ", "AccountKey=", "\\n", '"', '{"'),
    *("[", '{"a":', "\u200b", "a\u200b", " ", "\n", "%", "|"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), TAKEN)
def test_secrets_and_personal_data_are_replaced(text: str, expected: str) -> None:
    redacted, counts = REDACTOR.text(text)
    assert redacted == expected
    assert counts == Counter(re.findall(r"<([A-Z_]{5,})>", expected))
    assert REDACTOR.text(redacted) == (redacted, Counter())


@pytest.mark.parametrize("text", KEPT)
def test_ordinary_texts_of_agents_stay(text: str) -> None:
    assert REDACTOR.text(text) == (text, Counter())
    assert REDACTOR.text(json.dumps({"text": [text]})) == (json.dumps({"text": [text]}), Counter())


@given(st.sampled_from(TAKEN), st.integers(0, 5000), st.integers(0, 5000))
def test_a_finding_is_found_wherever_it_stands(case: tuple[str, str], before: int, after: int) -> None:
    def filler(length: int) -> str:
        return ("The quick brown fox jumps over the lazy dog.\n" * (length // 45 + 1))[:length]

    text, expected = case
    assert REDACTOR.text(f"{filler(before)}\n{text}\n{filler(after)}")[0] == (
        f"{filler(before)}\n{expected}\n{filler(after)}"
    )


def test_findings_that_overlap_are_one() -> None:
    assert REDACTOR.text("the token of the password is hunter22")[0] == "the token of the password is <SECRET>"
    assert REDACTOR.text("password: jane.doe1@gmail.com") == ("password: <SECRET>", Counter(SECRET=1))
    assert REDACTOR.text(f"api_key=sk-proj-{KEY}") == ("api_key=<SECRET>", Counter(SECRET=1))


@pytest.mark.parametrize("unit", HOSTILE)
def test_time_is_bounded(unit: str) -> None:
    bounded(unit, size=30_000, seconds=3)


@pytest.mark.parametrize(
    "unit",
    [
        *("4111 ", "@", "a.", "x@b.com ", "-----BEGIN", "-----BEGIN PRIVATE KEY-----", "-eyJaaaaaaaaaa", "://a:b@"),
        *("password=", "token=", "+49 1512 3456789 ", "DE89 ", '{"a":', "a\u200b"),
    ],
)
def test_a_megabyte_takes_seconds(unit: str) -> None:
    bounded(unit, size=1_000_000, seconds=30)


def bounded(unit: str, size: int, seconds: float) -> None:
    """A text that makes a regular expression quadratic would take minutes."""
    text = (unit * (size // len(unit) + 1))[:size]
    start = time.process_time()
    redacted, _ = REDACTOR.text(text)
    assert time.process_time() - start < seconds
    assert redacted == REDACTOR.text(text)[0] if size < 100_000 else redacted


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ('{"password":"hunter22","n":1.50}', '{"password":"<SECRET>","n":1.50}'),
        ('{"list": {"tokens": ["' + KEY + '", "x"]}}', '{"list": {"tokens": ["<SECRET>", "x"]}}'),
        ('{"jane@web.de": {"a": null}}', '{"<EMAIL_ADDRESS>": {"a": null}}'),
        ('{"card": 4111111111111111, "at": 1700000000}', '{"card": "<CREDIT_CARD>", "at": 1700000000}'),
        (r'{"file": "a\njane@web.de\n", "é": "\u00e9"}', r'{"file": "a\n<EMAIL_ADDRESS>\n", "é": "\u00e9"}'),
        (r'["{\"phone\": \"030 1234567\"}"]', r'["{\"phone\": \"<PHONE_NUMBER>\"}"]'),
        ('{"a": "jane@web.de', '{"a": "<EMAIL_ADDRESS>'),
    ],
)
def test_only_the_findings_in_json_change(kept: str, expected: str) -> None:
    assert REDACTOR.text(kept)[0] == expected


def test_json_that_is_nested_too_deeply_is_searched() -> None:
    text = "[" * 50_000 + '"jane@web.de"' + "]" * 50_000
    assert REDACTOR.text(text) == (text.replace("jane@web.de", "<EMAIL_ADDRESS>"), Counter(EMAIL_ADDRESS=1))


strings = st.text(max_size=12) | st.sampled_from([text for text, _ in TAKEN] + KEPT)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
)


@given(documents, st.booleans())
def test_json_stays_json_of_the_same_shape(document: Any, escaped: bool) -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return [shape(inner) for inner in value.values()]
        return [shape(inner) for inner in value] if isinstance(value, list) else None

    text = json.dumps([document], ensure_ascii=escaped)
    redacted, counts = REDACTOR.text(text)
    pairs = json.loads(redacted, object_pairs_hook=lambda pairs: {n: inner for n, (_, inner) in enumerate(pairs)})
    assert shape(pairs) == shape([document])
    assert counts or redacted == text


@given(st.text())
def test_every_text_is_searched(text: str) -> None:
    redacted, counts = REDACTOR.text(text)
    assert (redacted == text) == (not counts)


def turn(**fields: Any) -> Turn:
    return Turn(context_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,), **fields)


def test_a_turn_without_findings_is_the_same_object() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "exec", "arguments": '{"command": "ls -l"}'}}
    kept = turn(
        messages=(
            {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "image", "sha256": "ab" * 32}]},
        ),
        reply={"role": "assistant", "content": None, "tool_calls": [call]},
        sampling={"temperature": 1.0, "stop": ("END",)},
    )
    assert REDACTOR.turn(kept) is kept


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": ({"role": "user", "content": "I am jane@web.de"},)},
        {"messages": ({"role": "user", "content": [{"type": "text", "text": "I am jane@web.de"}]},)},
        {"messages": ({"role": "tool", "content": '{"from": "jane@web.de"}', "tool_call_id": "1"},)},
        {"reply": {"role": "assistant", "content": "to jane@web.de"}},
        {"reply": {"role": "assistant", "reasoning_content": "jane@web.de asks", "content": ""}},
        {
            "reply": {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"to":"jane@web.de"}'}}],
            }
        },
        {"sampling": {"stop": ("jane@web.de",)}},
    ],
)
def test_a_redacted_turn_holds_nothing_of_the_secret(fields: dict[str, Any]) -> None:
    kept = turn(policy_version=3, images=("ab" * 32,), tools="cd" * 32, id="chatcmpl-1", **fields)
    redacted = REDACTOR.turn(kept)
    assert "jane" not in repr(redacted)
    assert "<EMAIL_ADDRESS>" in repr(redacted)
    assert (redacted.context_ids, redacted.sampled_ids, redacted.logprobs) == ((), (), ())
    assert redacted.flaw == "redacted"
    assert (redacted.policy_version, redacted.images, redacted.tools, redacted.id) == (
        (kept.policy_version, kept.images, kept.tools, kept.id)
    )
    assert REDACTOR.turn(redacted) is redacted
    assert sequences_of([kept])
    assert not sequences_of([redacted, turn(parent=0)])


def test_a_missing_package_is_named() -> None:
    code = """if True:
        import sys
        sys.modules["phonenumbers"] = None
        from clawgym.errors import MissingDependency
        from clawgym.online.redaction import Redactor
        try:
            Redactor()
        except MissingDependency as error:
            print(error)
    """
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip().endswith("pip install 'clawgym[serve]'")
    assert issubclass(MissingDependency, ImportError)


def test_the_packages_are_imported_late() -> None:
    code = "import sys, clawgym.online.redaction; print({'phonenumbers', 'detect_secrets'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
