"""Find instructions that ask for the live internet. Sandboxes have no network, so such work can only be guessed.

A sentence counts if, without a negation before it, it

* asks for a web search ("use a search engine to find ...", "perform at least one web search", "search online"),
* asks to fetch something from the web ("download two PDFs from the internet", "scrape the vendor's website", "query the
  public API"),
* asks to probe or listen to other hosts (pings, speed tests, DNS lookups, live HTTP requests, public relays), or
* says that the internet is required.

If the instruction forbids the internet anywhere, at least two such sentences are needed: the ban then concerns one step
("the result must open without network access"). Sentences about a program that would fetch something count too, since
such a program cannot be tested.
"""

from __future__ import annotations

import re

__all__ = ["asks_for_web"]

_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
_WEB = r"(?:(?:live |public |open )*(?:internet|web)\b(?!-|\s?(?:app|page|server|ui|form|shop|team|store)))"
_NOT = re.compile(
    r"\b(?:no|not|never|don['’]t|without|avoid|cannot|can['’]t|offline|disabled|rather than|instead of|would"
    r"|if you (?:were|had)|blocked?)\b",
    re.IGNORECASE,
)
_OFFLINE = re.compile(
    r"\b(?:no|not|never|don['’]t|without|avoid)\b[^.;)\n]{0,60}?"
    r"(?:\binternet\b|\b(?:the|live|any) web\b|\bweb (?:request|access|brows|search|call|fetch|lookup)|\bonline\b"
    r"|\bnetwork (?:access|call|request|connection|use)|\b(?:use|using) (?:the )?network\b"
    r"|\bexternal (?:website|web|network))"
    r"|\b(?:fully|entirely|strictly|completely|purely|works?|run|runs) offline\b|\boffline[- ]only\b",
    re.IGNORECASE,
)
_SEARCH = re.compile(
    r"\b(?:web|internet|online)[- ]search(?:es|ing)?\b"
    r"|\bsearch[- ]engines?\b(?! (?:can|could|may|to index|index|optimi|visib|rank|crawl))"
    rf"|\bsearch(?:es|ing)? (?:on |through |across )?(?:the )?(?:{_WEB}|online\b)"
    r"|\bsearch(?:es|ing)? the public\b"
    r"|\b(?:look(?:ing)? up|research(?:ing)?|brows(?:e|ing))\b[^,]{0,60}"
    rf"\b(?:online\b|(?:on |via |from )?(?:the )?{_WEB})",
    re.IGNORECASE,
)
_FETCH = (
    r"\b(?:download|fetch|retriev|scrap(?=e|ing)|crawl|visit|pull|gather|collect|find|discover|obtain|access|call"
    r"|quer(?=y|ies)|subscrib)(?:s|e|es|y|ing|ed)?\b"
)
_FROM = (
    rf"(?:\b(?:from|on|via|over|using) the {_WEB}"
    r"|\bfrom (?:an? |the |its |their )?(?:[\w’'-]+ ){0,3}"
    r"(?:web ?sites?|homepages?|web ?pages?|GitHub|Wikipedia|portals?|official sources?)\b"
    r"|\b(?:public|live|official|open|REST|remote)(?: \w+){0,3} (?:APIs?|services|feeds?)\b"
    r"|\bhttps?://(?!localhost|127\.|0\.0\.0\.0))"
)
_LOAD = r"\b(?:download|fetch|retriev)(?:s|e|es|ing)?\b"
_DOMAIN = r"\b[a-z0-9-]+\.(?:org|com|gov|edu|int|net)\b"
_FETCHES = re.compile(
    rf"{_FETCH}.{{0,200}}?{_FROM}"
    r"|\b(?:scrap(?:e|ing)|crawl(?:ing)?|visit(?:ing)?|brows(?:e|ing))\b.{0,60}"
    r"\b(?:web ?sites?|web ?pages?|homepages?)\b"
    rf"|{_LOAD}.{{0,160}}{_DOMAIN}|{_DOMAIN}.{{0,80}}{_LOAD}"
    rf"|{_LOAD}.{{0,120}}\b(?:official|publicly available|openly licensed|web ?pages?|live pages|sitemaps?)\b"
    rf"|\bofficial\b.{{0,80}}{_LOAD}",
    re.IGNORECASE,
)
_REQUIRED = re.compile(
    r"\b(?:internet|web|online|network)(?: access| connection| use| lookup| research)?"
    r" (?:is |are )?(?:required|needed|allowed|permitted)\b"
    r"|\binternet (?:download|lookup|research|retrieval|sources|requirement|fetch|discovery|step|speed)s?\b"
    r"|\brequires? (?:live )?internet\b",
    re.IGNORECASE,
)
_HOSTS = re.compile(
    r"\bICMP (?:pings?|echo)\b|\blatency (?:tests?\b|to \d)|\bspeed tests?\b|\bmetasearch\b|\bpublic relays\b"
    r"|\breverse DNS\b|\bDNS (?:TXT )?(?:check|lookup|brute|hygiene)|\blive (?:\w+ ){0,2}(?:HTTP request|WebSocket)"
    r"|\bdownload each (?:unique )?URL|\bfor each domain\b.{0,60}\bfetch\b",
    re.IGNORECASE,
)
_RULES = (_SEARCH, _FETCHES, _REQUIRED, _HOSTS)


def asks_for_web(instruction: str) -> tuple[str, ...]:
    """The sentences that ask for the live internet; empty if the instruction forbids it.

    >>> asks_for_web("Write a report. Use a web search engine to find two sources.")
    ('Use a web search engine to find two sources.',)
    >>> asks_for_web("Use a web search engine. Do not use the internet.")
    ()
    """
    sentences = (sentence.strip(" -*•\t") for sentence in _SENTENCE.split(instruction))
    asking = tuple(sentence for sentence in sentences if any(_asks(sentence, rule) for rule in _RULES))
    return () if len(asking) < 2 and _OFFLINE.search(instruction) else asking


def _asks(sentence: str, rule: re.Pattern[str]) -> bool:
    return any(not _NOT.search(sentence[: match.start()]) for match in rule.finditer(sentence))
