"""Finds personal data in a text: what identifies a person, and has a format that can be checked.

Invariant: the time is linear in the length of the text. Every repetition is bounded.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence

__all__ = ["DETECTORS"]

Spans = Iterator[tuple[int, int]]

_DOMAIN = re.compile(r"@(?P<domain>(?:\w[\w-]{0,62}\.){1,8}(?P<top>[A-Za-z]{2,24}|xn--[\w-]{1,59}))(?![\w(-]|\.\w)")
_LOCAL = re.compile(r"[\w.%+'-]{1,64}\Z")
_RESERVED = re.compile(
    r"(?:.*\.)?(?:example(?:\.\w+)?|test|invalid|local|localhost|internal|localdomain|lan)\Z", re.IGNORECASE
)
"""Domains that are nobody's (RFC 2606, RFC 6762)."""
_NOBODY = re.compile(
    r"(?:git|hg|no-?reply|do-?not-?reply|you|your[\w.-]*|user|username|someone|somebody|name|email|foo|test|example)\Z",
    re.IGNORECASE,
)
"""Local parts of addresses of programs, and of examples."""
_USER = re.compile(r"://[^\s/@]{0,120}\Z")
"""The beginning of an address with a user, such as ``ssh://user@host``."""
_GENERIC = re.compile(
    r"(?:com|org|net|edu|gov|mil|int|info|biz|name|pro|dev|app|cloud|online|site|store|tech|xyz|shop|club|email|live|life"
    r"|world|today|agency|digital|solutions|systems|group|team|company|global|media|studio|design|services|center|academy"
    r"|health|care|bank|law|work|works|space|blog|wiki|page|link|click|top|vip|fun|one|art|museum|travel|jobs|mobi|coop"
    r"|asia|cat|tel|post|aero|berlin|hamburg|koeln|wien|bayern|swiss|london|paris|nyc|tokyo|eus|gal|uk|eu|xn--.*)\Z"
)
"""Top-level domains in which people have addresses, beside those of countries."""

_PLUS = re.compile(r"(?<![\w+.-])\+[1-9](?:[ .\-/()]{0,2}\d){6,14}(?![\w:])")
_NORTH_AMERICAN = re.compile(
    r"(?<![\w+.\-/])(?:1[-. ])?(?:\(\d{3}\) ?|\d{3}(?P<sep>[-.]))\d{3}(?(sep)(?P=sep)|[-.])\d{4}(?![\w-]|\.\d)"
)
_PHONE = re.compile(
    r"(?<![A-Za-z])(?:tele?phone?|phone|mobile|cell(?:phone)?|fax|whats ?app|sms|handy|telefon|t[ée]l[ée]phone"
    r"|m[óo]vil|tel[ée]fono|call me)(?:[ _-]?(?:number|num|nr|no))?[.)\"'`*\]]{0,4}"
    r"(?: (?:is|at|on|under|to))?[\s:=|\"'`*#]{0,6}(?P<number>\(?\d(?:[ .\-/()]{0,2}\d){6,14})(?![\w:-]|\.\d)",
    re.IGNORECASE,
)
_FICTION = re.compile(r"1?(?:\d{3})?555(?:01\d\d|1212)\Z")
"""North American numbers for films and manuals."""
_OTHER_NUMBER = re.compile(r"\+?(?:19|20)\d\d[-./]\d\d[-./]\d\d\b|\+\d+\.\d+\Z")
"""Dates and decimal numbers."""
_REGIONS = (
    *("US", "GB", "DE", "FR", "ES", "IT", "NL", "BE", "CH", "AT", "PL", "SE", "IE", "PT"),
    *("IN", "CN", "JP", "KR", "AU", "BR", "MX", "ZA", "RU", "TR", "SG", "IL"),
)
"""The countries whose national numbers are known."""
_MAX_CHECKED = 1000
"""The candidates in a text that are checked. All that follow are found unchecked, so that the time is bounded."""

_CARD = re.compile(
    r"(?<![\w.+-])(?:\d{13,19}|(?<!\d{4}[ -])\d{4}(?P<sep>[ -])"
    r"(?:\d{4}(?P=sep)\d{4}(?P=sep)\d{4}(?:(?P=sep)\d{3})?|\d{6}(?P=sep)\d{4,5})(?![ -]\d{4}\b))(?![\w-]|\.\d)"
)
_ISSUERS = re.compile(
    r"4\d{15}|4\d{12}|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}"
    r"|(?:6011|65\d\d|64[4-9]\d|35(?:2[89]|[3-8]\d))\d{12}|62\d{14,17}"
)
"""Visa, Mastercard, American Express, Diners Club, Discover, JCB and UnionPay, with their lengths."""

_IBAN = re.compile(r"(?<![A-Za-z0-9])(?=(?P<number>[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]){11,30}))")
_IBAN_LENGTHS = {
    country: length
    for length, countries in {
        15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK", 21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
    }.items()
    for country in countries.split()
}  # fmt: skip
"""From the IBAN registry of SWIFT, release 101."""

_SSN = re.compile(
    r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])"
    r"|(?:ssn|social security(?: number| no\.?)?)[\"'`*)\]]{0,4}(?: is)?[\s:=#\"'`*]{0,6}"
    r"(?P<named>\d{3}[ -]?\d{2}[ -]?\d{4})(?![\w-])",
    re.IGNORECASE,
)
_IPV4 = re.compile(r"(?<![\w.-])(?<!(?<!/)/)(?:\d{1,3}\.){3}\d{1,3}(?!\w|[.-]\w)")
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9a-f]{3}(?::[0-9a-f]{0,4}){3,7}(?![\w:])", re.IGNORECASE)
_VERSION = re.compile(r"(?:\bv|ver|version|release|build|revision|[=~^<>]=|[\^~])[\s:=\"'`(]{0,4}\Z", re.IGNORECASE)
_BITCOIN = re.compile(r"(?<![A-Za-z0-9])(?:[13][1-9A-HJ-NP-Za-km-z]{25,34}|bc1[02-9ac-hj-np-z]{39,59})(?![A-Za-z0-9])")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def _emails(text: str) -> Spans:
    from phonenumbers import SUPPORTED_REGIONS  # ISO 3166, as the domains of countries

    for match in _DOMAIN.finditer(text):
        local = _LOCAL.search(text[max(0, match.start() - 64) : match.start()])
        top = match["top"].lower()
        if (
            local
            and not _NOBODY.match(local.group())
            and (_GENERIC.match(top) or (top.upper() in SUPPORTED_REGIONS and top not in ("py", "sh")))  # of files
            and not _RESERVED.match(match["domain"])
            and not _USER.search(text[max(0, match.start() - 128) : match.start()])
        ):
            yield match.start() - len(local.group()), match.end()


def _phones(text: str) -> Spans:
    import phonenumbers

    def known(number: str, regions: Sequence[str]) -> bool:
        for region in regions:
            try:
                if phonenumbers.is_valid_number(phonenumbers.parse(number, region)):
                    return True
            except phonenumbers.NumberParseException:
                pass
        return False

    checked = 0
    for pattern, group, regions in ((_PLUS, 0, ("ZZ",)), (_NORTH_AMERICAN, 0, ("US",)), (_PHONE, "number", _REGIONS)):
        for match in pattern.finditer(text):
            number = match[group]
            digits = re.sub(r"\D", "", number)
            if _FICTION.match(digits) or _OTHER_NUMBER.match(number):
                continue
            checked += 1
            if checked > _MAX_CHECKED or known(number, regions):
                yield match.span(group)


def _cards(text: str) -> Spans:
    for match in _CARD.finditer(text):
        number = re.sub(r"\D", "", match.group())
        doubled = (sum(divmod(2 * int(digit), 10)) for digit in number[-2::-2])
        if _ISSUERS.fullmatch(number) and (sum(map(int, number[-1::-2])) + sum(doubled)) % 10 == 0:
            yield match.span()


def _ibans(text: str) -> Spans:
    for match in _IBAN.finditer(text):
        number = match["number"]
        length = _IBAN_LENGTHS.get(number[:2], 99)
        places = [n for n, char in enumerate(number) if char not in " -"]
        end = match.start() + (places[length - 1] if length <= len(places) else len(number)) + 1
        plain = "".join(number[n] for n in places[:length])
        if len(plain) < length or text[end : end + 1].isalnum():
            continue
        if int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1:
            yield match.start(), end


def _social_security(text: str) -> Spans:
    for match in _SSN.finditer(text):
        span = match.span("named") if match["named"] else match.span()
        digits = re.sub(r"\D", "", text[slice(*span)])
        area, group, serial = digits[:3], digits[3:5], digits[5:]
        printed = digits in ("123456789", "078051120", "219099999", "457555462")  # on samples
        if area not in ("000", "666") and area < "900" and group != "00" and serial != "0000" and not printed:
            yield span


def _addresses(text: str) -> Spans:
    for match in _IPV4.finditer(text):
        octets = [int(octet) for octet in match.group().split(".")]
        # Versions have small numbers or a zero at the end; few addresses of people do.
        if max(octets) < 64 or octets[3] == 0 or _VERSION.search(text[max(0, match.start() - 16) : match.start()]):
            continue
        if _is_public(match.group()):
            yield match.span()
    for match in _IPV6.finditer(text):
        if _is_public(match.group()) and not match.group().endswith("::"):  # a network
            yield match.span()


def _is_public(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_global and not found.is_multicast


def _wallets(text: str) -> Spans:
    for match in _BITCOIN.finditer(text):
        address = match.group()
        if address.startswith("bc1"):
            if len(address) in (42, 62):
                yield match.span()
            continue
        number = 0
        for char in address:
            number = number * 58 + _BASE58.index(char)
        if number < 1 << 200:
            data = number.to_bytes(25, "big")
            if hashlib.sha256(hashlib.sha256(data[:21]).digest()).digest()[:4] == data[21:]:
                yield match.span()


DETECTORS: dict[str, Callable[[str], Spans]] = {
    "EMAIL_ADDRESS": _emails,
    "PHONE_NUMBER": _phones,
    "CREDIT_CARD": _cards,
    "IBAN_CODE": _ibans,
    "US_SSN": _social_security,
    "IP_ADDRESS": _addresses,
    "CRYPTO": _wallets,
}
"""Kind (Presidio's name of it) -> the function that yields the start and the end of each finding."""
