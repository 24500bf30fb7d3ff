"""What the README promises of methods is what the code says of them (FIELD-CASES B6, B36)."""

from __future__ import annotations

import re
from pathlib import Path

from engine.params import COUPLED_DRAW_METHODS, METHODS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    (text,) = re.findall(rf"^##+ {title}\n(.*?)(?=^##)", README, flags=re.DOTALL | re.MULTILINE)
    return text


def test_each_method_says_how_its_tokens_are_accepted():
    """The table of methods: how the tree comes about, what of it is drawn, and how a token is accepted."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in README.splitlines() if row.startswith("| `")]
    methods = {row[0].strip("`"): row[1:] for row in rows if row[0].strip("`") in METHODS}
    assert set(methods) == set(METHODS)
    assert {name for name, (_, acceptance) in methods.items() if not acceptance} == {"off"}


def test_the_text_is_promised_for_the_methods_that_share_noise_only():
    promises = re.findall(r"^- (\*\*The .*?)(?=^- |^\n)", section("What is promised"), flags=re.DOTALL | re.MULTILINE)
    law, text, bits = (" ".join(promise.split()) for promise in promises)
    assert law.startswith("**The distribution, always.**") and "every method" in law
    promised = set(re.findall(r"`(\w+)`", text.split(".**")[0]))
    assert promised == set(COUPLED_DRAW_METHODS)
    assert "rounding" in text and "the shape of the batch" in text
    assert "`engine.reproducible=true`" in bits.split("**")[1] and "fp32" in bits
