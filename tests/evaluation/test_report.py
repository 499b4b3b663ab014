"""The report: a page that needs nothing else, whatever the categories are called, and JSON that says the same."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from round_logs import log_of

from dspark_jax.errors import RequestError
from dspark_jax.evaluation.decode import Decoded
from dspark_jax.evaluation.log import RoundLog
from dspark_jax.evaluation.page import render
from dspark_jax.evaluation.report import Report, Run
from dspark_jax.jobs.json_lines import to_line

RAN = {"checkpoint": "DIR", "model": "0123abcd", "numerics": "bfloat16", "date": "2000-01-01", "mesh": {"data": 2}}
HOSTILE = ["<script>alert(1)</script>", "$\\frac{", "数学", "a & b"]


def decoded(temperature: float, prompts: int = 12, width: int = 5) -> Decoded:
    rng, rounds = np.random.default_rng(0), 30
    accepted = np.minimum(rng.geometric(0.4, prompts * rounds) - 1, width)
    prompt = np.repeat(np.arange(prompts), rounds)
    log = log_of(
        np.full(len(accepted), width),
        accepted,
        rng.normal(size=(len(accepted), 5)).astype(np.float32),
        prompt=prompt,
        category=np.array(HOSTILE)[prompt % len(HOSTILE)],
        begin=np.tile(np.arange(rounds) * 20, prompts),
    )
    return Decoded(temperature, prompts, int(log.tokens.sum()), [], log)


@pytest.fixture(scope="module")
def report() -> Report:
    runs = [Run.of(decoded(0.0), "prompts.jsonl", "0123abcd"), Run.of(decoded(1.0), "prompts.jsonl", "0123abcd")]
    return Report(RAN, runs)


class Page(HTMLParser):
    """Every element must be closed; collects elements, what they refer to, and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_needs_nothing_else(report: Report) -> None:
    text = render(report)
    page = Page(text)
    assert page.elements.count("svg") == 2 * 6
    assert not {"script", "link", "img", "iframe"} & set(page.elements)
    assert all(reference.startswith("#") for reference in page.references) and page.references
    assert not re.search(r"@import|url\((?!#)", text)
    assert "#010203" not in text and "currentColor" in text, "text in pictures has the page's colour"
    for name in HOSTILE:
        assert page.texts.count(name) >= 4, "in the picture and in the table of both runs"


def test_the_page_shows_the_figures(report: Report) -> None:
    texts = Page(render(report)).texts
    for run in report.runs:
        length = run.overall.accepted_length
        assert f"{length.value:.2f} ({length.low:.2f}–{length.high:.2f})" in texts
        assert f"{run.temperatures.temperatures[0]:.3f}" in texts
    assert {"0123abcd", "data 2", "Greedy", "Temperature 1"} <= set(texts)


def test_json_says_the_same(report: Report) -> None:
    told = json.loads(to_line(report.to_dict()), parse_constant=pytest.fail)
    assert (told["schema"], told["ran"]["mesh"]) == (1, {"data": 2})
    for facts, run in zip(told["runs"], report.runs, strict=True):
        assert facts["overall"]["accepted_length"]["low"] == run.overall.accepted_length.low
        assert sorted(facts["by_category"]) == sorted(HOSTILE)
        assert (
            sum(part["rounds"] for part in facts["by_new_tokens_before_round"].values()) == facts["overall"]["rounds"]
        )
        table = np.array(facts["calibration"]["reliability"], float)  # null is NaN
        np.testing.assert_array_equal(table, run.calibration.reliability)
        assert facts["calibration"]["summary"]["ece"] == run.temperatures.ece_before
        assert facts["scaled_calibration"]["summary"]["ece"] == run.temperatures.ece_after
    assert report.temperatures == report.runs[1].temperatures


def test_one_prompt_and_a_narrow_offer_leave_gaps() -> None:
    """No intervals, nothing held out, and positions that were never offered."""
    run = Run.of(decoded(0.0, prompts=1, width=2), "prompts.jsonl", "0123abcd")
    assert run.scaled_calibration is None and run.temperatures.ece_after is None
    told = json.loads(to_line(Report(RAN, [run]).to_dict()), parse_constant=pytest.fail)["runs"][0]
    assert told["overall"]["prefix_acceptance_per_offering_round"][2] == {"value": None, "low": None, "high": None}
    assert told["calibration"]["ece"][2] is None and told["scaled_calibration"] is None
    assert Page(render(Report(RAN, [run]))).elements.count("svg") == 6


def test_without_an_offered_draft_there_is_nothing_to_report() -> None:
    nothing = Decoded(0.0, 1, 1, [], log_of([0], [0]))
    for empty in (nothing, Decoded(0.0, 0, 0, [], RoundLog.of([], block=5))):
        with pytest.raises(RequestError, match=r"no draft was offered \(greedy\)"):
            Run.of(empty, "prompts.jsonl", "0123abcd")
