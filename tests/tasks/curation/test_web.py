"""Which instructions ask for the live internet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.tasks.curation.web import asks_for_web

ASKS = [
    "Use a search engine to find two sources.",
    "1) Perform live web searches for each row.",
    "Download two guideline PDFs from the internet.",
    "From the official RFC Editor site, fetch the XML index.",
    "Download the page from the rfc-editor.org domain without hardcoding its address.",
    "Internet access is required to fetch pages.",
    "Query the public Wikidata API for each name.",
    "Please scrape the vendor's website every hour.",
    "Fetch https://example.com/a.json and count its keys.",
    "Look up each name online.",
    "Download the “Attribution 4.0” legal code from the official Creative Commons website.",
    "Subscribe to the public market data feed of each row.",
    "Search the public skills ecosystem for two candidates.",
    "Run an ICMP ping against every host.",
    "For each address, fetch the reverse DNS name.",
    "Send a live HTTP request to each endpoint.",
]
DOES_NOT = [
    "Summarise the download counts in input/app.csv.",
    "Describe what search engines can index.",
    "Fetch http://localhost:3456/api/bugs.",
    "Do not fetch anything from the internet.",
    "List the columns Google Search, TikTok and YouTube.",
    "Write the URL of each row to out/urls.txt.",
    "If you would normally verify hours via web search, skip it.",
    "Plan the launch of our website.",
    "Search the notes for the latency of each ping.",
    "Describe how the live demo uses DNS.",
]


@pytest.mark.parametrize("sentence", ASKS)
def test_asks_for_web(sentence):
    assert asks_for_web(f"Please help me.\n{sentence}\nWrite out/a.md.") == (sentence,)


@pytest.mark.parametrize("sentence", DOES_NOT)
def test_does_not_ask_for_web(sentence):
    assert asks_for_web(f"Please help me.\n{sentence}\nWrite out/a.md.") == ()


@pytest.mark.parametrize("ban", ["No internet use.", "Do not use the Internet;", "This must run fully offline."])
def test_ban_outweighs_one_sentence(ban):
    assert asks_for_web(f"{ASKS[0]} {ban}") == ()


def test_two_sentences_outweigh_a_ban():
    assert asks_for_web(f"{ASKS[0]} {ASKS[1]} The report must open without network access.") == tuple(ASKS[:2])


@given(st.text(max_size=300))
def test_returned_sentences_are_in_the_instruction(instruction):
    assert all(sentence in instruction for sentence in asks_for_web(instruction))
