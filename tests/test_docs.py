"""The documentation against the code, the records and itself."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "ci" / "make_docs.py").exists():
    pytest.skip("needs the whole checkout", allow_module_level=True)
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "ci")]
accuracy, make_docs, report = (importlib.import_module(name) for name in ("accuracy", "make_docs", "report"))

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = sorted(path for kind in report.KINDS for path in report.RECORDS.glob(f"{kind}_*.json"))


def test_generated_regions_are_up_to_date(capsys):
    status = report.update(make_docs.documents(), check=True) | report.update_plots(check=True)
    assert status == 0, f"run `python ci/make_docs.py`: {capsys.readouterr().out}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_measured_figure_is_written_by_hand(page):
    """Times, rates, ratios and measured errors stand in generated regions only, so each has its record."""
    text = report.REGION.sub("", page.read_text())
    units = "ms|µs|us|GFLOP/s|GOP/s|TFLOPS|TOPS|GB/s|TB/s|x faster|times (?:as fast|faster|slower|the time)|% (?:faster|slower|of the peak)"
    figures = re.findall(rf"\d[\d.,]*\s?(?:{units})\b", text)
    figures += re.findall(r"\b\d\.\d+e-0?7\b", text)
    assert figures == []


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_records_say_where_they_come_from(path):
    record = json.loads(path.read_text())
    if "steps" in record:  # of ci/gpu: its parity or bench is such a record
        assert record["card"]["name"]
        record = record["steps"].get("parity") or record["steps"]["bench"]
    assert {"cpu", "cores", "isa"} <= set(record["machine"])
    assert {"strata_pa", "python", "numpy", "compiler"} <= set(record["versions"])
    assert record["command"]
    assert path.stem.endswith(f"_{record['date'][:10]}")
    for r in record["results"]:
        assert {"kernel", "device", "context", "queries", "max_rel_err", "median_ms", "sha256"} <= set(r)


@pytest.mark.parametrize("path", sorted(report.RECORDS.glob("e2e_*.json")), ids=lambda path: path.name)
def test_records_of_a_model_are_sound(path):
    """bench/end_to_end.py: where it comes from, what it asks of a fixed cache, and the default equal to itself."""
    record = json.loads(path.read_text())
    assert {"strata_pa", "torch", "transformers"} <= set(record["versions"])
    assert record["model"]["sha256"]
    assert path.stem.endswith(f"_{record['date'][:10]}")
    assert record["default"]["same_again"] or not record["default"]["runs"]
    assert record["default"].get("same_in_other_build", True)
    fixed = {(r["prompt"], r["run"]): r for r in record["results"] if r["mode"] == "fixed"}
    for (prompt, run), r in fixed.items():
        if run in ("fp32", "imma", "exact"):
            assert (r["kl_first"] <= 1e-10, r["tokens_equal"]) == (True, record["steps"]), (prompt, run)
    assert fixed


def test_the_figure_is_that_of_the_records():
    assert accuracy.mark() in accuracy.FIGURE.read_text(), "run `python bench/accuracy.py`"


def test_regions():
    text = "a\n<!-- generated: x -->\nold\n<!-- end of x -->\nb\n<!-- generated: y-z -->\n<!-- end of y-z -->\n"
    new = report.renewed(text, {"x": "| 1 |", "y-z": "2\n"})
    assert new == "a\n<!-- generated: x -->\n\n| 1 |\n\n<!-- end of x -->\nb\n<!-- generated: y-z -->\n\n2\n\n<!-- end of y-z -->\n"
    assert report.renewed(new, {"x": "| 1 |", "y-z": "2"}) == new
    for wrong in ({"x": ""}, {"x": "", "y-z": "", "other": ""}):
        with pytest.raises(KeyError):
            report.renewed(text, wrong)


def test_stale_regions_are_found_and_rewritten(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: x -->\nold\n<!-- end of x -->")
    assert report.update({page: {"x": "new"}}, check=True) == 1
    assert "old" in page.read_text()
    assert report.update({page: {"x": "new"}}, check=False) == 0
    assert "new" in page.read_text()
    assert report.update({page: {"x": "new"}}, check=True) == 0
    assert capsys.readouterr().out == "page.md: out of date\npage.md: rewritten\n"


def test_a_record_makes_tables(tmp_path, monkeypatch):
    """The newest record of a machine counts."""
    result = {"case": "8/8 dense", "kernel": "exact", "device": "cpu", "max_rel_err": 1.234e-7, "bound": 1e-6}
    result |= {"median_ms": 12.345, "gflops": 150.4, "sha256": "0123456789abcdef"}
    for day, median in (("2031-01-01", 1), ("2031-01-03", 2.5), ("2031-01-02", 3)):
        record = {"machine": {"cpu": "C", "cores": 2, "isa": "avx2", "devices": ["cpu"]}, "versions": {"strata_pa": "1"}, "command": "c"}
        record |= {"date": f"{day}T00:00:00+00:00", "results": [result | {"median_ms": median}]}
        (tmp_path / f"parity_{day}.json").write_text(json.dumps(record))
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    assert "| 8/8 dense | cpu | `exact` | 1.2e-7 | 1.0e-6 | 2.50 | 150 | `01234567` |" in report.parity_region()
    assert report.bench_region() == report.peak_region() == report.aims_region() == "No record yet."


BENCH_TIMES = {"reps": 3, "median_ms": 2.0, "q1_ms": 1.9, "q3_ms": 2.25, "min_ms": 1, "max_ms": 3}
BENCH_RESULT = {
    "set": "main",
    "case": "8/4 selected",
    "kernel": "exact",
    "peer": False,
    "device": "cuda:0",
    "max_rel_err": 1.234e-7,
    "bound": 1e-6,
}
BENCH_RESULT |= {"median_ms": 2.0, "times": BENCH_TIMES, "cold": BENCH_TIMES | {"median_ms": 2.5}, "eager": None, "gflops": 150.4}
BENCH_RESULT |= {"us_per_query": 500.0, "sha256": "0123456789abcdef", "context": 8, "widest": 8, "queries": 4}


@pytest.fixture
def bench_record(tmp_path, monkeypatch):
    """A record of `ci/gpu` with a bench in it, in folders of its own."""
    clocks = {"name": "Card", "driver_version": "1.2", "clocks.sm": "1980 MHz"}
    record = {
        "machine": {"cpu": "C", "cores": 2, "isa": "avx2", "devices": ["cpu", "cuda:0"]},
        "versions": {"strata_pa": "1"},
        "command": "c",
    }
    peak = {"isa": "avx512", "threads": 2, "peak_gops": 1000.4, "exact_gops": 650.0, "share": 0.65, "best_share": 0.701}
    record |= {"date": "2031-01-01T00:00:00+00:00", "cards": {"cuda:0": {"before": clocks, "after": None}}, "peak": [peak]}
    peer = BENCH_RESULT | {"kernel": "FP16 flash", "peer": True, "bound": None, "sha256": None, "max_rel_err": None}
    grown = [BENCH_RESULT | {"set": "queries", "queries": n, "us_per_query": us} for n, us in ((16, 3.0), (1, 123.4))]
    record |= {
        "results": [BENCH_RESULT, peer, *grown],
        "refused": [{"case": "8/4 selected", "kernel": "FP16 cuDNN", "reason": "no engine"}],
    }
    whole = {"date": record["date"], "steps": {"bench": record, "golden": {"digests": {"passed": 7}}}}
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "bench_x_2031-01-01.json").write_text(json.dumps(whole))
    for name, folder in (("ROOT", ""), ("RECORDS", "records"), ("PLOTS", "plots")):
        monkeypatch.setattr(report, name, tmp_path / folder)
    return record, tmp_path / "records" / "bench_x_2031-01-01.json"


def test_a_bench_record_makes_tables(bench_record):
    region = report.bench_region()
    assert "cuda:0: Card, driver 1.2; clock of the processors: 1980 MHz before." in region
    assert "In the same run, tests of the checked-in digests: 7 passed." in region
    assert "| 8/4 selected | `exact` | 1.2e-7 | 2.00 | 1.90 - 2.25 | 2.50 |  | 150 | `01234567` |" in region
    assert "| 8/4 selected | FP16 flash | NaN |" in region
    assert "| queries | `exact` |\n| --- | ---: |\n| 1 | 123 |\n| 16 | 3.00 |" in region
    assert "- 8/4 selected, FP16 cuDNN: no engine" in region
    for panel in ("error", "queries"):
        assert f"(plots/bench_x_2031-01-01_{panel}.svg)" in region
    assert "| C | avx512 | 2 | 1000 | 650 | 65% | 70% |" in report.peak_region()


def test_the_aims(bench_record, monkeypatch):
    monkeypatch.setattr(report, "MOST_MS", {("8/4 selected", "exact"): (2.0, 1.5), ("8/4 selected", "fp32"): (1.0, None)})
    monkeypatch.setattr(report, "RATIO_CASES", ("8/8 dense",))
    record, path = bench_record
    for kernel, ms in (("exact", 3.0), ("FP16 cuDNN", 1.0), ("FP32 memory-efficient", 9.0)):
        record["results"].append(BENCH_RESULT | {"case": "8/8 dense", "kernel": kernel, "median_ms": ms})
    record["results"].append(BENCH_RESULT | {"set": "queries", "queries": 2048, "us_per_query": 41.0})
    path.write_text(json.dumps({"date": record["date"], "steps": {"bench": record}}))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.aims_region().splitlines()[2:]]
    assert [row[1:] for row in rows] == [
        ["at most 2.00", "1.50", "2.00", "reached"],
        ["at most 4.50", "3.00", "3.00", "beyond"],
        ["at least 4.00", "6.00", "3.00", "missed"],
        ["at most 3.00", "", "3.01", "missed"],
    ]


def test_plots_are_drawn_from_the_records(bench_record, capsys):
    pytest.importorskip("matplotlib")
    record, path = bench_record
    names = [report.PLOTS / f"{path.stem}_{panel}.svg" for panel in ("error", "queries")]
    assert report.update_plots(check=True) == 1
    assert report.update_plots(check=False) == 0
    assert sorted(report.PLOTS.iterdir()) == names
    assert all("FP16 flash" in names[0].read_text() and "<svg" in name.read_text() for name in names)
    assert report.update_plots(check=True) == 0
    record["results"][2]["us_per_query"] = 4.0
    whole = json.loads(path.read_text())
    whole["steps"]["bench"] = record
    path.write_text(json.dumps(whole))
    capsys.readouterr()
    assert report.update_plots(check=True) == 1
    assert capsys.readouterr().out == f"plots/{names[1].name}: out of date\n"
    path.unlink()
    assert report.update_plots(check=True) == 1
    assert report.update_plots(check=False) == 0
    assert list(report.PLOTS.iterdir()) == []


def test_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["out"].shape == (100, 8, 128)
    assert names["lse"].shape == (100, 8)


def test_the_readme_has_the_two_commands():
    """.ci/run takes the second one out of the README, so it must be the only line with pytest."""
    readme = (ROOT / "README.md").read_text()
    (main,) = re.findall(r"^.*venv.*strata-pa parity$", readme, re.MULTILINE)
    (test,) = re.findall(r"^.*pytest.*$", readme, re.MULTILINE)
    for command in (main, test):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    if (ROOT / ".ci" / "run").exists():
        assert "grep -e '-m pytest' README.md" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
