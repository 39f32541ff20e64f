"""The command `strata-pa`: what it prints and writes, and how it fails."""

import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import strata_pa
from strata_pa import _cases, _parity, _show, cli, reference

PACKAGE = Path(strata_pa.__file__).parent
PORTABLE = json.loads((Path(__file__).parent / "golden" / "portable.json").read_text())["cases"]
ON_CPU = [row["name"] for row in strata_pa.kernels() if row["backend"] == "cpu"]
SMALL = ["parity", "--context", "96", "--reps", "1", "--device", "cpu"]


def command(*arguments, python=(), **variables):
    """The finished process of `python -m strata_pa`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("STRATA_")} | variables
    return subprocess.run(
        [sys.executable, *python, "-m", "strata_pa", *arguments], capture_output=True, text=True, env=environment, check=False
    )


def failure(capsys, *arguments):
    """The exit status and the one line of complaint."""
    status = cli.main(arguments)
    stderr = capsys.readouterr().err
    assert stderr.startswith("strata-pa: error: ")
    assert "Traceback" not in stderr
    return status, stderr


# info and doctor


def test_entry_point():
    (script,) = (s for s in importlib.metadata.entry_points(group="console_scripts") if s.name == "strata-pa")
    assert script.load() is cli.main


def test_info():
    done = command("info", STRATA_PA_NUM_THREADS="3")
    assert (done.returncode, done.stderr) == (0, "")
    for row in strata_pa.kernels():
        assert row["what"] in done.stdout
    for variable in strata_pa.environment_variables():
        assert variable["name"] in done.stdout
    assert "3 threads" in done.stdout
    assert "v2           refused: exists for CUDA devices" in done.stdout


def test_info_json():
    done = command("info", "--json", STRATA_PROMPT_ATTN_OLD="1")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert facts["problems"] == []
    assert facts["version"] == strata_pa.__version__
    assert facts["build"] == strata_pa.build_info()
    assert [device["device"] for device in facts["devices"]] == [device["device"] for device in strata_pa.capabilities()["devices"]]
    assert {row["name"]: row["value"] for row in facts["environment"]} == {
        row["name"]: "1" if row["name"] == "STRATA_PROMPT_ATTN_OLD" else None for row in strata_pa.environment_variables()
    }


def test_doctor():
    done = command("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "checks passed" in done.stdout
    for name in ON_CPU:
        assert f"kernel {name}" in done.stdout


def test_a_bad_variable():
    for arguments in (["info"], ["info", "--json"], ["doctor"]):
        done = command(*arguments, STRATA_PA_FORCE_ISA="abacus")
        assert (done.returncode, done.stderr) == (1, "")
        assert "STRATA_PA_FORCE_ISA" in done.stdout
        assert "abacus" in done.stdout
    done = command("parity", STRATA_PA_FORCE_ISA="abacus")
    assert done.returncode == 2
    assert "abacus" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def broken(tmp_path):
    """Runs a copy of the package without its compiled module, in a Python without site-packages, so without NumPy."""
    copy = tmp_path / "strata_pa"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_core.*.so", "__pycache__"))

    def run(*arguments):
        return command(*arguments, python=["-S"], PYTHONPATH=str(tmp_path))

    return run, copy


@pytest.mark.parametrize("damage", ["missing", "not a library"])
def test_a_broken_installation(broken, damage):
    run, copy = broken
    if damage != "missing":
        (copy / f"_core{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_text("not a library")
    for arguments in (["info"], ["doctor"]):
        done = run(*arguments)
        assert (done.returncode, done.stderr) == (1, "")
        assert "strata_pa._core" in done.stdout
        assert "reinstall strata_pa" in done.stdout
        assert "pip install numpy" in done.stdout
    done = run("info", "--json")
    assert done.returncode == 1
    facts = json.loads(done.stdout)
    assert [problem.split()[0] for problem in facts["problems"]] == ["numpy", "strata_pa._core"]
    assert facts["build"] is None
    done = run("parity")
    assert done.returncode == 1
    assert done.stderr.startswith("strata-pa: error: numpy cannot be imported")
    assert "Traceback" not in done.stderr


def test_no_command():
    done = command()
    assert done.returncode == 2
    assert "usage: strata-pa" in done.stderr


# parity


def test_parity(tmp_path, capsys):
    path = tmp_path / "record.json"
    assert cli.main([*SMALL, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert list(record) == ["machine", "versions", "date", "command", "results", "refused"]
    assert {"cpu", "cores", "isa"} <= set(record["machine"])
    assert {"strata_pa", "python", "numpy", "compiler"} <= set(record["versions"])
    assert record["date"].endswith("+00:00")
    assert [r["kernel"] for r in record["results"]] == ON_CPU
    case = _cases.make_case(_cases.shape_of(96, 96))
    printed = capsys.readouterr().out
    for r in record["results"]:
        assert (r["device"], r["context"], r["queries"], r["ok"]) == ("cpu", 96, 96, True)
        assert 0 < r["max_rel_err"] <= r["bound"] == 1.0e-6
        assert 0 < r["min_ms"] <= r["median_ms"] <= r["max_ms"]
        out = strata_pa.prompt_attention(case.q, case.kv, kernel=r["kernel"], **case.options)
        assert r["sha256"] == hashlib.sha256(out.tobytes()).hexdigest()
        assert r["sha256"][:8] in printed


def test_json_on_stdout(capsys):
    assert cli.main([*SMALL, "--kernels", "exact", "--queries", "9", "--threads", "1", "--seed", "3", "--json", "-"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["kernel"], result["threads"], result["queries"], result["widest"]) == ("exact", 1, 9, 96)


def test_the_sample_layer(capsys):
    """The included layer gives the checked-in digests of the golden layer that it is."""
    assert cli.main(["parity", "--data", "sample", "--device", "cpu", "--reps", "1", "--json", "-"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {r["kernel"]: r["sha256"] for r in results} == PORTABLE["layer12"]
    assert all(r["max_rel_err"] <= 1.0e-6 for r in results)


def test_a_broken_bound(capsys, monkeypatch):
    monkeypatch.setitem(_parity.BOUNDS, "fp32", 1e-12)
    status, stderr = failure(capsys, *SMALL)
    assert status == 1
    assert "the bound is broken: fp32 on 96/96 dense" in stderr
    assert "exact" not in stderr


def test_an_output_that_is_not_written_breaks_the_bound(capsys, monkeypatch):
    monkeypatch.setattr(_parity, "prompt_attention", lambda *arguments, **options: None)
    assert cli.main([*SMALL, "--kernels", "imma", "--json", "-"]) == 1
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["max_rel_err"] is None
    assert result["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernels", "fp64"], "'fp64' is not a kernel; known kernels: fp32"),
        (["--kernels", "fp32,v2", "--device", "cpu"], "v2 does not run on cpu: exists for CUDA devices"),
        (["--device", "abacus:0"], "there is no device 'abacus:0'; devices: "),
        (["--queries", "8"], "--queries needs --context"),
        (["--context", "8", "--queries", "9"], "9 queries do not fit in a context of 8"),
        (["--data", "sample", "--context", "8"], "leave out --context"),
        (["--context", "8", "--json", "no/such/folder/x.json"], "there is no folder"),
        (["--context", "8", "--seed", "-1"], "--seed must not be negative"),
        (["--context", "8", "--threads", "5000"], "num_threads must be from 1 to 1024"),
    ],
)
def test_what_cannot_be_run(capsys, arguments, words):
    status, stderr = failure(capsys, "parity", *arguments)
    assert status == 2
    assert words in stderr


def test_arguments_that_are_no_numbers(capsys):
    for wrong in ("0", "-1", "x"):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["parity", "--reps", wrong])
        assert stopped.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err


def layer(**changes):
    """A small capture; a change of None leaves the array out."""
    rng = np.random.default_rng(1)
    arrays = {
        "q": rng.standard_normal((5, 4, 64), np.float32),
        "k": rng.integers(-127, 128, (30, 2, 64)).astype(np.int8),
        "v": rng.integers(-127, 128, (30, 2, 64)).astype(np.int8),
        "k_scale": rng.uniform(0.01, 0.02, (30, 2, 2)).astype(np.float16),
        "v_scale": rng.uniform(0.01, 0.02, (30, 2, 2)).astype(np.float16),
    } | changes
    return {key: array for key, array in arrays.items() if array is not None}


def test_a_capture(tmp_path, capsys):
    path = tmp_path / "layer.npz"
    arrays = layer(ids=np.array([[3, -1, 7]] * 5, np.int32), sm_scale=np.float64(0.25))
    np.savez(path, **arrays)
    assert cli.main(["parity", "--data", str(path), "--device", "cpu", "--reps", "1", "--json", "-"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["case"], r["context"], r["queries"], r["widest"]) for r in results] == [("layer.npz", 30, 5, 2)] * len(ON_CPU)

    case = _cases.read_case(path)
    values = {x: arrays[x].reshape(30, 2, 2, 32) * arrays[f"{x}_scale"][..., None].astype(np.float64) for x in "kv"}
    k, v = (values[x].reshape(30, 2, 64)[[3, 7]].repeat(2, 1) for x in "kv")
    score = np.exp(0.25 * np.einsum("ihd,chd->ihc", arrays["q"], k))
    expected = np.einsum("ihc,chd->ihd", score / score.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(reference.attention_float64(case.q, case.kv, **case.options), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v": None}, "has no array 'v'; it has k, k_scale, q, v_scale"),
        ({"q": np.zeros((5, 4, 64))}, "q must be float32 with 3 dimensions, got float64 [5, 4, 64]"),
        ({"q": np.zeros((0, 4, 64), np.float32)}, "shapes do not fit"),
        ({"q": np.zeros((31, 4, 64), np.float32)}, "shapes do not fit"),
        ({"q": np.zeros((5, 3, 64), np.float32)}, "shapes do not fit"),
        ({"q": np.zeros((5, 4, 32), np.float32)}, "shapes do not fit"),
        ({"v": np.zeros((29, 2, 64), np.int8)}, "shapes do not fit"),
        ({"k_scale": np.zeros((30, 2, 3), np.float16), "v_scale": np.zeros((30, 2, 3), np.float16)}, "shapes do not fit"),
        ({"v_scale": np.zeros((30, 2, 1), np.float16)}, "shapes do not fit"),
        ({"ids": np.full((5, 3), 30, np.int32)}, "ids must be [5, cap] with cells from 0 to 29, or -1"),
        ({"ids": np.full((4, 3), 0, np.int32)}, "ids must be [5, cap]"),
        ({"sm_scale": np.float32(np.inf)}, "sm_scale must be one finite number"),
        ({"sm_scale": np.array(["x"])}, "sm_scale must be one finite number"),
        ({"k": np.array([{}], object)}, "not an .npz of plain arrays"),
    ],
)
def test_a_capture_that_does_not_fit(tmp_path, capsys, changes, words):
    path = tmp_path / "layer.npz"
    np.savez(path, **layer(**changes))
    status, stderr = failure(capsys, "parity", "--data", str(path))
    assert status == 2
    assert f"layer.npz: {words}" in stderr


def test_a_file_that_is_no_capture(tmp_path, capsys):
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "single.npy", np.zeros(3))
    np.savez(tmp_path / "whole.npz", **layer())
    (tmp_path / "half.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:1000])
    for name, words in (
        ("none.npz", "no such file"),
        ("text.npz", "not an .npz"),
        ("single.npy", "a single array"),
        ("half.npz", "a damaged one"),
        ("", "cannot be read: Is a directory"),
    ):
        status, stderr = failure(capsys, "parity", "--data", str(tmp_path / name))
        assert status == 2
        assert name in stderr
        assert words in stderr


def test_a_capture_that_no_kernel_serves(tmp_path, capsys):
    path = tmp_path / "layer.npz"
    np.savez(path, **layer(**{x: layer()[x][..., :48] for x in "qkv"}))
    assert cli.main(["parity", "--data", str(path), "--device", "cpu", "--reps", "1"]) == 1
    printed = capsys.readouterr()
    assert "layer.npz: exact refused: head_dim 48 is not one of" in printed.out
    assert printed.err == "strata-pa: error: no kernel ran\n"


def test_plot_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, stderr = failure(capsys, *SMALL, "--plot", str(tmp_path / "x.png"))
    assert status == 2
    assert "pip install 'strata_pa[plot]'" in stderr


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli.main([*SMALL, "--plot", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    status, stderr = failure(capsys, *SMALL, "--plot", str(tmp_path / "x.abacus"))
    assert status == 2
    assert "could not be written" in stderr


def test_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(SMALL) == 0
    printed = capsys.readouterr()
    for heading in _show.HEADINGS:
        assert heading in printed.out
    assert "96/96 dense" in printed.out
    assert "<= 1e-06" in printed.out


# The made problems


def test_made_problems_are_the_same_everywhere():
    """Digests of the arrays, so that a record's output digest means the same with every NumPy."""
    case = _cases.make_case(_cases.shape_of(3000, 10), seed=1)
    arrays = [
        case.q,
        case.kv.k,
        case.kv.v,
        case.kv.k_scale,
        case.kv.v_scale,
        case.kv.page_table,
        case.options["ids"],
        case.options["widths"],
    ]
    assert (
        hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
        == "b467aea7b44de7d91f52068c5d2aa6546de549d0091aac785d536e1f6db75bc2"
    )


@pytest.mark.parametrize(("context", "queries"), [(4000, 50), (2100, 64), (700, 3), (5, 2), (1, 1), (600, 600)])
def test_made_selections(context, queries):
    case = _cases.make_case(_cases.shape_of(context, queries))
    ids, widths = case.options["ids"], case.options["widths"]
    assert case.q.shape == (queries, 24, 256)
    assert 1.9 < case.q.std() < 2.1
    if queries == context:
        assert ids is None
        assert case.cells == sum(range(1, context + 1))
        return
    assert case.cells == widths.sum()
    before = None
    for i in range(queries):
        visible = context - queries + i + 1
        row = ids[i, : widths[i]]
        assert widths[i] == min(visible, 2051)
        assert (ids[i, widths[i] :] == -1).all()
        assert (np.diff(row) > 0).all()
        assert set(range(max(0, visible - 512), visible)) <= set(row.tolist())
        assert row[-1] == visible - 1
        older = set(row[row < visible - 512].tolist())
        if before and visible > 3000:
            assert 0.02 < len(before - older) / len(before) < 0.04
        before = older


def test_sampled_queries():
    case = _cases.make_case(_cases.shape_of(96, 50))
    assert case.sampled(1) == [0]
    assert case.sampled(3) == [0, 24, 49]
    assert case.sampled(1000) == list(range(50))
