"""The report page: made of whatever lies in a folder, whole without a network, and alive in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import sinklens as sl
from sinklens.report import gather, report
from sinklens.triggers.report import TriggerReport
from tests import tiny

MADE = {"model": "tiny", "made": "2026-01-01T00:00:00+00:00", "prompts": {"source": "made up"}}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: `apt-get install chromium`")


def scan_of(layers: int, heads: int, token: str = "<s>") -> sl.SinkScan:
    """A made-up scan; masses fall from L0H0 on, so that the order is known."""
    count = layers * heads
    frame = pd.DataFrame({
        "layer": np.repeat(np.arange(layers), heads), "head": np.tile(np.arange(heads), layers),
        "kv_head": np.tile(np.arange(heads) // 2, layers), "sink_mass": np.linspace(0.99, 0.0, count),
        "sink_rate": 0.5, "uniform_mass": 0.05, "boost": np.linspace(20, 0, count), "sink_position": 0,
        "sink_token": token, "located_mass": 0.5, "located_share": 1.0, "first_four_mass": 0.5,
        "dormant_fraction": 0.25, "entropy": 1.0, "value_ratio": 0.1, "output_norm": 1.0, "row_sum": 1.0,
        "max_row_sum_error": 0.0,
    })  # fmt: skip
    rng = np.random.default_rng(0)
    frame["sink_mass"] = rng.permutation(frame.sink_mass)
    return sl.SinkScan(frame, {"rule": {"eps": 0.3}, "sink_keys": "the first visible token"}, MADE)


def trigger_report() -> TriggerReport:
    row = {"layer": 1, "head": 2, "direction": "wakes", "trigger": "token ' and'", "tokens": "' and'",
           "dormant_fraction": 0.8, "auroc": 0.9, "precision": 0.8, "recall": 0.7, "f1": 0.75, "risk_difference": 0.6,
           "low": 0.5, "high": 0.7, "p_adjusted": 0.001, "counterfactual": "passed", "grade": "strict",
           "explained": 0.5}  # fmt: skip
    marks = {"layer": 1, "head": 2, "direction": "wakes", "passage": "p1", "token": ["salt", " and", "<b>pepper</b>"],
             "awake": [0.1, 0.9, 0.2], "trigger": [False, True, False], "counted": [False, True, True]}  # fmt: skip
    return TriggerReport(pd.DataFrame([row]), {}, MADE, {"passages": pd.DataFrame(marks)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of result, in a folder and in folders below it."""
    root = tmp_path_factory.mktemp("runs")
    model, prompts = tiny.causal(), sl.PromptSet.from_tokens(tiny.tokens(6, 24), tokenizer=tiny.tokenizer())
    sl.scan(model, prompts, progress=False).save(root / "scan")
    sl.contrast(model, prompts, "L0H1,L1H2", sets=["L0H1,L1H2"], resamples=100, progress=False).save(root / "contrast")
    triggers = trigger_report()
    made_by = {**MADE, "model": sl.SinkScan.load(root / "scan").provenance["model"]}
    TriggerReport(triggers.frame, {}, made_by, triggers.frames).save(root)
    spread = {"mean": 0.99, "low": 0.98, "high": 1.0, "seeds": 8}
    toy = {"softmax-1x1": {"solved": 8, "seeds": 8, "off": spread, "at": spread}}
    (root / "statistics.json").write_text(json.dumps(toy))
    return root


def test_one_page_of_everything(folder: Path) -> None:
    page = report(folder).read_text(encoding="utf-8")
    for words in ("heads put more than 0.3", "drop the sink, renormalize", "wakes at token", "softmax-1x1",
                  "A control is the head", "Where the numbers come from"):  # fmt: skip
        assert words in page
    assert '<article id="L1H2">' in page
    assert '<article id="L0H1">' in page
    data = json.loads(page.partition("id='data'>")[2].partition("</script>")[0])
    units = {column["key"]: column["unit"] for column in data["columns"]}
    assert units["dormant_fraction"] == sl.SinkScan.units["dormant_fraction"], "the unit of the result it came from"
    assert "&lt;b&gt;pepper" in page
    assert "<b>pepper" not in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page), "the page needs no network"
    assert len(page) < 1_000_000
    assert report(folder).read_text(encoding="utf-8") == page, "the same results, the same page"


def test_a_token_cannot_end_the_script(tmp_path: Path) -> None:
    scan_of(2, 4, token="</script><img src=x>").save(tmp_path)
    page = report(tmp_path).read_text(encoding="utf-8")
    data = page.partition("id='data'>")[2].partition("</script>")[0]
    assert json.loads(data)["rows"][0][0] == 0
    assert "<img" not in page.replace(data, "")


def test_the_newest_result_counts(tmp_path: Path) -> None:
    scan = scan_of(2, 4)
    scan.save(tmp_path / "old")
    newer = sl.SinkScan(scan.frame, scan.settings, {**MADE, "made": "2026-02-02T00:00:00+00:00"})
    newer.save(tmp_path / "new")
    runs = gather(tmp_path)
    assert runs.results["scan"].provenance["made"].startswith("2026-02")
    assert [path.parent.name for path in runs.older] == ["old"]


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(sl.InputError, match="made of a folder of results"):
        report(tmp_path / "nothing")
    with pytest.raises(sl.InputError, match="no results here"):
        report(tmp_path)
    scan_of(2, 4).save(tmp_path / "a")
    other = scan_of(2, 4)
    sl.SinkScan(other.frame, other.settings, {**MADE, "model": "another"}).save(tmp_path / "b")
    trigger_report().save(tmp_path / "c")
    with pytest.raises(sl.InputError, match="about one model: expected results of one model, got another, tiny"):
        report(tmp_path)
    (tmp_path / "b" / "scan.json").write_text("{")
    with pytest.raises(sl.InputError, match="a result cannot be read"):
        report(tmp_path)


_PROBE = """<script>
window.problems = [];
addEventListener("error", (event) => window.problems.push(String(event.message)));
addEventListener("load", () => {
  const $ = (id) => document.getElementById(id), seen = {};
  const heads = () => [...$("table").tBodies[0].rows].map((row) => row.cells[0].textContent);
  const button = (text) => [...$("table").tHead.querySelectorAll("button")].find((b) => b.textContent === text);
  const sorted = () => [...$("table").tHead.rows[0].cells].map((c) => c.getAttribute("aria-sort")).filter(Boolean);
  seen.squares = $("grid").querySelectorAll("rect:not(.cursor)").length;
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.start = [heads()[0], sorted()];
  button("head").click(); seen.byHead = [heads()[0], sorted()];
  button("head").click(); seen.byHeadDown = [heads()[0], sorted()];
  $("contains").value = "l1h2"; $("contains").dispatchEvent(new Event("input")); seen.one = heads();
  $("contains").value = ""; $("least").value = 0.5; $("least").dispatchEvent(new Event("input"));
  seen.count = $("count").textContent;
  $("grid").focus();
  $("grid").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  seen.at = $("at").textContent;
  $("colour").value = "dormant_fraction"; $("colour").dispatchEvent(new Event("change"));
  seen.key = $("key").textContent;
  const texts = [...$("grid").querySelectorAll("text")].map((t) => t.getBoundingClientRect());
  const clash = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  seen.clashes = texts.filter((a, i) => texts.some((b, j) => j > i && clash(a, b))).length;
  seen.problems = window.problems;
  document.body.innerHTML = "";
  const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
});
</script></head>"""


def browse(page: Path, tmp_path: Path) -> dict[str, Any]:
    """Open the page in headless Chromium, sort and filter it, and say what was seen."""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</head>", _PROBE, 1), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--enable-logging=stderr", "--window-size=1100,900", "--virtual-time-budget=5000", "--dump-dom",
               probed.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:]
    seen: dict[str, Any] = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    return seen


@in_browser
def test_the_page_is_alive(folder: Path, tmp_path: Path) -> None:
    seen = browse(report(folder), tmp_path)
    scan = sl.SinkScan.load(folder / "scan")
    assert seen["problems"] == []
    assert seen["overflow"] <= 0
    assert seen["clashes"] == 0
    assert seen["squares"] == 8
    assert seen["start"] == [str(scan.top(1)[0]), ["descending"]]
    assert seen["byHead"] == ["L0H0", ["ascending"]]
    assert seen["byHeadDown"] == ["L1H3", ["descending"]]
    assert seen["one"] == ["L1H2"]
    assert seen["count"].startswith(f"{int((scan.frame.sink_mass >= 0.5).sum())} of 8")
    assert seen["at"].startswith("L0H1: kv head 0")
    assert seen["key"].startswith("dormant fraction")


@in_browser
def test_the_layout_holds_for_eighty_layers_of_sixty_four_heads(tmp_path: Path) -> None:
    scan_of(80, 64).save(tmp_path)
    page = report(tmp_path)
    assert page.stat().st_size < 6_000_000
    seen = browse(page, tmp_path)
    assert seen["problems"] == []
    assert seen["overflow"] <= 0
    assert seen["clashes"] == 0
    assert seen["squares"] == 5120
    assert seen["one"] == ["L1H2"]
    assert seen["count"] == "2534 of 5120 heads, first 60 shown"


def test_no_label_of_a_chart_is_clipped() -> None:
    """The longest name of an intervention fits left of the axis, at 6.2 pixels a letter."""
    from sinklens.causal import FULL
    from sinklens.report.charts import LEFT

    assert max(len(f"{i.words} {i.id}") for i in FULL) * 6.2 < LEFT - 12


def test_a_result_shows_itself_in_a_notebook() -> None:
    scan = scan_of(80, 64, token="<b>")
    shown = scan._repr_html_()
    rows = re.findall(r"<tr><td>(\d+)</td><td>(\d+)</td>", shown)
    assert [sl.Head(int(layer), int(head)) for layer, head in rows] == list(scan.top(12))
    assert "mean weight on the sink, 0..1" in shown
    assert "5108 more rows" in shown
    assert "<b>" not in shown
    assert "3568 of 5120 heads" in repr(scan)


def test_a_contrast_shows_its_costs_in_a_notebook(folder: Path) -> None:
    shown = sl.Contrast.load(folder / "contrast").preview()
    assert list(shown.columns[:6]) == ["heads", "role", "tokens", "count", "KL C0", "KL C1"]
    assert not shown.duplicated(["heads", "tokens"]).any()
    assert shown["heads"].iloc[0] == "L0H1"


def test_the_command_writes_the_page(folder: Path) -> None:
    from typer.testing import CliRunner

    from sinklens.cli import app

    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0
    assert "report.html" in done.output


def test_the_map_of_a_large_model_keeps_its_ticks_apart() -> None:
    figure = scan_of(80, 64).plot()
    layout = figure.layout
    across = (layout.width - layout.margin.l - layout.margin.r - 90) / 64 * layout.xaxis.dtick
    down = (layout.height - layout.margin.t - layout.margin.b) / 80 * layout.yaxis.dtick
    assert across > 24
    assert down > 14


@pytest.mark.parametrize("kind", ["contrast", "triggers", "toy", "no triggers"])
def test_a_page_of_one_kind_alone(kind: str, folder: Path, tmp_path: Path) -> None:
    if kind == "contrast":
        sl.Contrast.load(folder / "contrast").save(tmp_path)
    elif kind == "triggers":
        trigger_report().save(tmp_path)
    elif kind == "no triggers":
        TriggerReport.empty({"why_empty": "no head sleeps"}, MADE).save(tmp_path)
    else:
        shutil.copy(folder / "statistics.json", tmp_path)
    page = report(tmp_path).read_text(encoding="utf-8")
    assert {"contrast": "drop the sink", "triggers": "wakes at token", "toy": "softmax-1x1",
            "no triggers": "no head sleeps"}[kind] in page  # fmt: skip
    assert ("id='grid'" in page or 'id="grid"' in page) == (kind == "triggers")


def test_a_run_of_many_heads_is_summed_up_shortly(folder: Path, tmp_path: Path) -> None:
    contrast = sl.Contrast.load(folder / "contrast")
    one = contrast.frame[contrast.frame["heads"] == "L0H1"]
    frames = [one.assign(heads=f"L0H{head}", head=head) for head in range(30)]
    sl.Contrast(pd.concat(frames), contrast.settings, contrast.provenance).save(tmp_path)
    page = report(tmp_path).read_text(encoding="utf-8")
    assert "... and 22 heads more." in page
    assert page.count("<article") == 24
    assert "24 of 30 tested heads have a section" in page
