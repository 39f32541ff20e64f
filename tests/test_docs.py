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
make_docs, report = (importlib.import_module(name) for name in ("make_docs", "report"))

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = sorted(path for kind in report.KINDS for path in report.RECORDS.glob(f"{kind}_*.json"))


def test_generated_regions_are_up_to_date(capsys):
    status = report.update(make_docs.documents(), check=True)
    assert status == 0, f"run `python ci/make_docs.py`: {capsys.readouterr().out}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_measured_figure_is_written_by_hand(page):
    """Times, rates, ratios and measured errors stand in generated regions only, so each has its record."""
    text = report.REGION.sub("", page.read_text())
    figures = re.findall(r"\d[\d.,]*\s?(?:ms|µs|us|GFLOP/s|TFLOPS|TOPS|GB/s|TB/s|x faster|times (?:as fast|faster)|% faster)\b", text)
    figures += re.findall(r"\b\d\.\d+e-0?7\b", text)
    assert figures == []


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_records_say_where_they_come_from(path):
    record = json.loads(path.read_text())
    if "steps" in record:  # of ci/gpu: its parity is such a record
        assert record["card"]["name"]
        record = record["steps"]["parity"]
    assert {"cpu", "cores", "isa"} <= set(record["machine"])
    assert {"strata_pa", "python", "numpy", "compiler"} <= set(record["versions"])
    assert record["command"]
    assert path.stem.endswith(f"_{record['date'][:10]}")
    for r in record["results"]:
        assert {"kernel", "device", "context", "queries", "max_rel_err", "median_ms", "sha256"} <= set(r)


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
    assert report.cpu_region() == "No record yet."


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
