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

import inputs
import numpy as np
import pytest

import strata_pa
from strata_pa import _bench, _cases, _parity, _peers, _show, cli, reference

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
    """The included layer gives the last rows of the golden layer that it is, whose digests are checked in."""
    assert cli.main(["parity", "--data", "sample", "--device", "cpu", "--reps", "1", "--json", "-"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    q, kv, options = inputs.arguments(inputs.load("layer12"))
    kv = strata_pa.PagedKV(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.page_table)
    options = {key: value for key, value in options.items() if value is not None}
    want = {}
    for kernel, golden in PORTABLE["layer12"].items():
        out = strata_pa.prompt_attention(q, kv, kernel=kernel, **options)
        assert hashlib.sha256(out.tobytes()).hexdigest() == golden
        want[kernel] = hashlib.sha256(out[-results[0]["queries"] :].tobytes()).hexdigest()
    assert {r["kernel"]: r["sha256"] for r in results} == want
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
    for column in _show.PARITY:
        assert column.heading in printed.out
    assert "96/96 dense" in printed.out
    assert "<= 1e-06" in printed.out


# bench

BENCH = ["bench", "--device", "cpu", "--reps", "2", "--sample", "4", "--threads", "1"]


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def test_bench(tmp_path, capsys, no_torch):
    path = tmp_path / "record.json"
    assert cli.main([*BENCH, "--shapes", "96/96,90/7/32", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert list(record) == ["machine", "versions", "date", "command", "cards", "peak", "results", "refused"]
    assert (record["cards"], record["peak"], record["refused"]) == ({}, [], [])
    assert "torch" not in record["versions"]
    assert [(r["case"], r["kernel"]) for r in record["results"]] == [(c, k) for c in ("96/96 dense", "90/7 selected 32") for k in ON_CPU]
    printed = capsys.readouterr().out
    for r in record["results"]:
        case = _cases.make_case(_cases.Shape(96, 96, 0) if r["context"] == 96 else _cases.Shape(90, 7, 32))
        out = strata_pa.prompt_attention(case.q, case.kv, kernel=r["kernel"], **case.options)
        assert r["sha256"] == hashlib.sha256(out.tobytes()).hexdigest()
        assert r["sha256"][:8] in printed
        expected = reference.attention_float64(case.q, case.kv, rows=case.sampled(4), **case.options)
        assert r["max_rel_err"] == np.abs(out[case.sampled(4)] - expected).max() / np.abs(expected).max()
        assert r["ok"] is True
        assert (r["set"], r["timed"], r["peer"], r["sampled"], r["threads"], r["cold"], r["eager"]) == (
            "single",
            "host",
            False,
            4,
            1,
            None,
            None,
        )
        times = r["times"]
        assert 0 < times["min_ms"] <= times["q1_ms"] <= times["median_ms"] <= times["q3_ms"] <= times["max_ms"]
        assert times["reps"] == 2
        assert r["us_per_query"] == pytest.approx(times["median_ms"] * 1e3 / r["queries"])
    assert "L2 cold" not in printed  # a CPU has no such column


def test_bench_with_peers(capsys):
    """They agree with float64, and one that cannot run is listed with its reason."""
    pytest.importorskip("torch")
    assert cli.main([*BENCH, "--shapes", "80/80,80/9/0,80/9/16,60/9/64", "--kernels", "exact", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    found = {(r["case"], r["kernel"]): r for r in record["results"] if r["peer"]}
    dense, last, equal, short = "80/80 dense", "80/9 dense", "80/9 selected 16", "60/9 selected 64"
    gather, in_place = "gather + dequantize, FP32", "gather + dequantize in place, FP32"
    whole = {(case, name) for case in (dense, last) for name in ("FP32", "dequantize, FP32")}
    assert set(found) == whole | {(equal, gather), (equal, in_place), (short, gather)}
    for r in found.values():
        assert 0 < r["max_rel_err"] < 5e-6
        assert (r["bound"], r["sha256"]) == (None, None)
    assert [(r["case"], r["kernel"], r["reason"]) for r in record["refused"]] == [
        (short, in_place, "Unavailable: lists of several lengths")
    ]
    assert record["versions"]["torch"]


def test_a_peer_that_fails_is_listed(capsys, monkeypatch):
    pytest.importorskip("torch")

    def fails(tensors):
        def call():
            raise RuntimeError("out of memory\nand more")

        return call

    monkeypatch.setattr(_peers, "_CPU_DENSE", (_peers.Peer("one", fails),))
    assert cli.main([*BENCH, "--shapes", "20/20", "--kernels", "exact"]) == 0
    assert "20/20 dense: one refused: RuntimeError: out of memory\n" in capsys.readouterr().out


def test_choice_of_peers():
    target = _parity.choose_target("cpu", None)

    def names(set_name, shape, asked):
        return [peer.name for peer in _bench.peers_for(set_name, shape, target, asked)]

    selected = _cases.Shape(4096, 64)
    assert names("single", selected, "none") == []
    assert names("single", selected, "all") == ["gather + dequantize, FP32", "gather + dequantize in place, FP32"]
    assert names("single", selected, "compiled") == ["compiled gather + dequantize, FP32"]
    assert names("width", selected, "all") == []
    assert _bench.kernels_for("width", target, False) == ("fp32", "exact")
    assert _bench.kernels_for("width", target, True) == _bench.kernels_for("main", target, False) == target.kernels


def test_bench_with_a_limit(capsys, monkeypatch, no_torch):
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(cli.time, "perf_counter", lambda: float(next(clock)))
    assert cli.main([*BENCH, "--shapes", "20/20,30/30", "--kernels", "exact", "--seconds", "3", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [r["case"] for r in record["results"]] == ["20/20 dense"]
    assert record["refused"] == [{"case": "30/30 dense", "kernel": "all kernels", "reason": "not begun: 3 seconds were over"}]


def test_bench_of_a_broken_bound(capsys, monkeypatch, no_torch):
    monkeypatch.setitem(_parity.BOUNDS, "imma", 1e-12)
    status, stderr = failure(capsys, *BENCH, "--shapes", "40/40")
    assert status == 1
    assert "the bound is broken: imma on 40/40 dense" in stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--shapes", "large"],
            "--shapes: 'large' is neither a set (cpu, main, long, geometry, apart, context, width, queries) nor CONTEXT/QUERIES",
        ),
        (["--shapes", "8"], "'8' is neither a set"),
        (["--shapes", "8/0"], "'8/0' is neither a set"),
        (["--shapes", "8/4/2/1"], "'8/4/2/1' is neither a set"),
        (["--shapes", "8/9"], "9 queries do not fit in a context of 8"),
        (["--shapes", "8/8", "--kernels", "fp64"], "'fp64' is not a kernel"),
        (["--shapes", "8/8", "--device", "abacus"], "there is no device 'abacus'"),
        (["--shapes", "8/8", "--json", "no/such/folder/x.json"], "there is no folder"),
        (["--shapes", "8/8", "--seed", "-1"], "--seed must not be negative"),
    ],
)
def test_a_bench_that_cannot_be_run(capsys, arguments, words):
    status, stderr = failure(capsys, "bench", *arguments)
    assert status == 2
    assert words in stderr


def test_bench_plot(tmp_path, capsys, no_torch, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(_bench.SETS, "queries", (_cases.Shape(64, 1, 32), _cases.Shape(64, 4, 32)))
    assert cli.main([*BENCH, "--shapes", "20/20,queries", "--plot", str(tmp_path / "x.svg")]) == 0
    picture = (tmp_path / "x.svg").read_text()
    assert picture.count('id="axes_') == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, stderr = failure(capsys, *BENCH, "--shapes", "20/20", "--plot", str(tmp_path / "x.svg"))
    assert status == 2
    assert "pip install 'strata_pa[plot]'" in stderr


def test_the_peak(capsys, monkeypatch, no_torch):
    """Where there is an instruction for byte dot products `exact` cannot be faster than it; elsewhere it is said that there is none."""
    monkeypatch.setattr(_bench, "PEAK_SHAPE", _cases.Shape(256, 64, 0))
    isa = _parity.choose_target("cpu", None).architecture
    assert cli.main([*BENCH, "--shapes", "8/8", "--kernels", "exact", "--peak", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    if isa in ("scalar", "avx2"):
        assert record["peak"] == []
        assert record["refused"][-1]["reason"] == f"the {isa} path has no instruction for byte dot products"
        return
    (row,) = record["peak"]
    assert (row["isa"], row["threads"]) == (isa, 1)
    assert 0 < row["share"] <= row["best_share"] < 1
    scores = 24 * (256 * 64 - 64 * 63 // 2)
    assert row["exact_gops"] * row["times"]["median_ms"] == pytest.approx(7 * 2 * 256 * scores * 1e-6)


def test_no_peak_without_the_instruction():
    assert _bench.dot_peak("scalar", 1) is None
    with pytest.raises(strata_pa.UnsupportedDevice, match="no instruction-set path 'abacus'"):
        _bench.dot_peak("abacus", 1)


def test_what_is_promised_on_long_rows():
    assert _bench.bound_of("imma", 2051) == _bench.bound_of("exact", 2052) == _bench.bound_of("exact", 131072) == 1e-6
    assert _bench.bound_of("imma", 2052) is _bench.bound_of("exact", 131073) is None


def test_times():
    times = _bench.times_of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (times.reps, times.min_ms, times.q1_ms, times.median_ms, times.q3_ms, times.max_ms) == (5, 1, 2, 3, 4, 5)
    assert _bench.times_of([7.0]) == _bench.Times(1, 7, 7, 7, 7, 7)


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


def test_selections_apart():
    case = _cases.make_case(_cases.Shape(100, 20, 16, apart=True))
    ids = case.options["ids"]
    assert case.name == "100/20 selected 16 apart"
    assert (np.diff(ids) > 0).all()
    assert ids.max() < 80
    for i in range(16):
        assert len(np.unique(ids[i : i + 5])) == 80
    with pytest.raises(_cases.DataError, match="80 cells that every query sees are not two lists"):
        _cases.make_case(_cases.Shape(100, 20, 41, apart=True))


def test_many_queries_repeat():
    case = _cases.make_case(_cases.Shape(2100, 2100, 0, 1, 1, 64))
    assert case.name == "2100/2100 dense 1/1/64"
    np.testing.assert_array_equal(case.q[2048:], case.q[:52])
