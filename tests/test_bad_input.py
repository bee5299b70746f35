"""Wrong invocations and wrong files: each ends with status 2 and one message that names what, where and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import stageloom

HEAD = "stageloom schedule 1\nname: s\nranks: 2\nmicrobatches: 2\npath: 0 1\n"
SOUND = HEAD + "rank 0: F0 F1 BW0 BW1\nrank 1: F0 BW0 F1 BW1\n"
JSON_HEAD = '{"format": "stageloom schedule", "version": 1, "name": "s", '

# arguments -> a part of the message
INVOCATIONS: list[tuple[str, str]] = [
    ("foo", "No such command 'foo'"),
    ("--nonsense", "No such option: --nonsense"),
    ("simulate", "Missing argument 'SCHEDULE'"),
    ("compare -m 8", "Missing option '--ranks' / '-p'"),
    ("compare -p 8", "Missing option '--microbatches' / '-m'"),
    ("simulate 1f1b", "--ranks/-p is missing"),
    ("simulate 1f1b -p 4", "--microbatches/-m is missing"),
    ("simulate 1f1b -p four -m 8", "'four' is not a whole number"),
    ("simulate 1f1b -p 4.5 -m 8", "'4.5' is not a whole number"),
    ("simulate 1f1b -p 4 -m 8 --f fast", "'fast' is not a number"),
    ("simulate 1f1b -p 0 -m 8", "ranks = 0; a whole number of at least 1 is needed"),
    ("simulate 1f1b -p -3 -m 8", "ranks = -3"),
    ("simulate 1f1b -p 4 -m 0", "microbatches = 0"),
    ("simulate 1f1b -p 100000 -m 100000", "60,000,000,000 ops"),
    ("simulate interleaved-1f1b -p 64 -m 64 -v 1000000000", "ops at these sizes"),
    ("compare -p 0 -m 8", "ranks = 0"),
    ("compare -p 8 -m -1", "microbatches = -1"),
    ("compare -p 8 -m 8 --only hanayo:waves", "option 'waves': expected NAME=VALUE"),
    ("compare -p 8 -m 8 --only hanayo:depth=2", "no option 'depth'"),
    ("compare -p 8 -m 8 --only {tmp}/sound.loom", "has 2 ranks and 2 micro-batches, the others 8 and 8"),
    ("compare -p 8 -m 8 --only {tmp}/none.loom", "cannot be read"),
    ("compare -p 8 -m 8 --memory 80e9", "the costs say nothing in bytes"),
    ("compare -p 8 -m 8 --memory 0", "a number of bytes above 0"),
    ("compare -p 8 -m 8 --memory lots", "'lots' is not a number"),
    ("simulate hand.lom -p 4 -m 8", "hand.lom: cannot be read"),
    ("compare -p 8 -m 8 --only nonsense", "no schedule named 'nonsense'"),
    ("simulate 1fib -p 4 -m 8", "did you mean 1f1b"),
    ("simulate dualpip -p 4 -m 8", "did you mean dualpipe"),
    ("simulate xyzzy -p 4 -m 8", "no schedule named 'xyzzy'; known: 1f1b"),
    ("simulate dualpipe -p 3 -m 8", "P = 3; its two directions need an even number of ranks; nearest: P = 2 or 4"),
    ("simulate dualpipe -p 1 -m 8", "nearest: P = 2"),
    ("simulate dualpipe -p 4 -m 6", "at least M = 2P; nearest: M = 8"),
    ("simulate dualpipe -p 4 -m 9", "needs an even number; nearest: M = 8 or 10"),
    ("simulate dualpipev -p 4 -m 7", "at least M = 2P; nearest: M = 8"),
    ("simulate chimera -p 5 -m 8", "nearest: P = 4 or 6"),
    ("simulate pipedream-2bw -p 4 -m 8 -O minibatch=3", "nearest: minibatch = 4"),
    ("simulate 1f1b -p 4 -m 8 -v 2", "no option 'chunks'; its options: none"),
    ("simulate interleaved-1f1b -p 4 -m 8 -v 0", "chunks = 0; a whole number of at least 1"),
    ("simulate interleaved-1f1b -p 4 -m 8 -v x", "'x' is not a whole number"),
    ("simulate interleaved-1f1b -p 4 -m 8 -v 2 -O chunks=3", "the same thing twice"),
    ("simulate gpipe -p 4 -m 8 -O order=sideways", "expected one of reverse, in-order"),
    ("simulate gpipe -p 4 -m 8 -O order", "option 'order': expected NAME=VALUE"),
    ("simulate gpipe -p 4 -m 8 -O order=reverse -O order=in-order", "order is given twice"),
    ("simulate gpipe -p 4 -m 8 -O colour=red", "no option 'colour'; its options: order"),
    ("simulate hanayo -p 4 -m 8 -O waves=0", "waves = 0"),
    ("simulate seq1f1b -p 4 -m 8 -O slices=two", "slices = 'two'"),
    ("compare -p 4 -m 8 --f -1", "--f -1: a finite number of at least 0"),
    ("compare -p 4 -m 8 --b nan", "--b nan"),
    ("compare -p 4 -m 8 --w inf", "--w inf"),
    ("compare -p 4 -m 8 --latency -0.1", "--latency -0.1"),
    ("compare -p 4 -m 8 --overlap 0", "overlap_time"),
    ("compare -p 4 -m 8 --w-share -0.5", "--w-share -0.5"),
    ("compare -p 4 -m 8 --f 0 --b 0 --w 0", "nothing to simulate"),
    ("compare -p 4 -m 8 --unit hours", "'hours' is not one of 's', 'ms', 'us'"),
    ("compare -p 4 -m 8 --tokens 4096", "without a time unit"),
    ("compare -p 4 -m 8 --unit ms --tokens 0", "--tokens 0"),
    ("simulate 1f1b -p 4 -m 8 --jitter -1", "jitter = -1"),
    ("simulate 1f1b -p 4 -m 8 --jitter nan", "jitter = nan"),
    ("simulate 1f1b -p 4 -m 8 --jitter 0.1 --runs 0", "runs = 0"),
    ("simulate 1f1b -p 4 -m 8 --jitter 0.1 --runs -5", "runs = -5"),
    ("simulate 1f1b -p 4 -m 8 --jitter 0.1 --seed -1", "seed = -1"),
    ("show 1f1b -p 4 -m 8 --format gif", "'gif' is not one of"),
    ("show 1f1b -p 4 -m 8 --format png", "a picture needs a file; give -o FILE.png"),
    ("show 1f1b -p 4 -m 8 -o {tmp}/x.gif", "'.gif' names no form"),
    ("show 1f1b -p 4 -m 8 -o {tmp}/missing/x.svg", "missing"),
    ("show 1f1b -p 4 -m 8 --format svg -o {tmp}", "is a folder; give the name of a file"),
    ("simulate {tmp}/none.loom", "none.loom: cannot be read: No such file"),
    ("validate {tmp}/none.loom", "none.loom: cannot be read: No such file"),
    ("validate {tmp}", "cannot be read: Is a directory"),
    ("validate", "Missing argument 'FILE'"),
    ("validate {tmp}/sound.loom --sends never", "'never' is not one of 'buffered', 'fifo', 'blocking'"),
    ("simulate {tmp}/sound.loom -p 4 -m 8", "a file states its own sizes"),
    ("compare -p 4 -m 8 --costs {tmp}/none.yaml", "none.yaml: cannot be read: No such file"),
    ("demo --out {tmp}/sound.loom", "cannot be made"),
    ("simulate seq1f1b -p 4 -m 8 -O slices=--1", "slices = '--1'"),
    ("simulate seq1f1b -p 4 -m 8 -O ranks=4", "no option 'ranks'"),
    ("simulate seq1f1b -p 4 -m 8 -O self=4", "no option 'self'"),
    ("simulate 1f1b -p 4 -m 8 --f 1e308", "F: Input should be 0 or from 1e-100 to 1e+100"),
    ("simulate 1f1b -p 4 -m 8 --latency 1e308", "latency: Input should be 0 or from 1e-100 to 1e+100"),
    ("simulate 1f1b -p 4 -m 8 --w-share 1e9", "w_share: Input should be less than or equal to 100"),
    ("simulate 1f1b -p 4 -m 8 --unit s --tokens 1e-320", "tokens: Input should be 0 or from 1e-100"),
    ("simulate 1f1b -p 4 -m 8 --jitter 0.1 --runs 99999999999999999999", "runs of this schedule's 64 ops"),
    ("show 1f1b -p 4 -m 8 -o {tmp}/.svgz", "'.svgz' names no form"),
    ("show 1f1b -p 4 -m 8 -o {tmp}/{long}.svg", "File name too long"),
    ("simulate {long} -p 4 -m 8", "no schedule named"),
]

# text of a .loom file -> a part of the message
LOOMS: list[tuple[str, str]] = [
    ("", "is empty"),
    ("hello\n", "line 1: 'hello' is not the first line of a schedule"),
    ("stageloom schedule 9\n", "format version 9; this Stageloom reads version 1"),
    ("stageloom schedule 1\n", "`name:` is missing"),
    ("stageloom schedule 1\nname: s\nranks: 2\n", "`microbatches:` is missing"),
    ("stageloom schedule 1\nname: s\nranks: 2\nmicrobatches: 2\n", "`path:` is missing"),
    (SOUND.replace("ranks: 2", "ranks: two"), "line 3: ranks is 'two'"),
    (SOUND.replace("ranks: 2", "ranks: 0"), "line 3: ranks is '0'; a whole number from 1"),
    (SOUND.replace("ranks: 2", "ranks: 99999999999"), "line 3: ranks is '99999999999'"),
    (SOUND.replace("microbatches: 2", "microbatches: -2"), "line 4: microbatches is '-2'"),
    (SOUND + "ranks: 3\n", "line 8: 'ranks' is said twice"),
    (SOUND + "colour: red\n", "line 8: unknown key 'colour'"),
    (SOUND + "nonsense\n", "line 8: 'nonsense' is no line of a schedule"),
    (SOUND + "rank 0: F0\n", "line 8: rank 0 has a line already"),
    (SOUND + "rank 7: F0\n", "has ops for rank 7, but ranks are 0 to 1"),
    (SOUND + "rank x: F0\n", "the rank of this line is 'x'"),
    (SOUND.replace("F0 BW0", "G0 BW0"), "line 7: 'G0' is no op"),
    (SOUND.replace("F0 BW0", "F BW0"), "line 7: 'F' is no op"),
    (SOUND.replace("F0 BW0", "F0&BW0&F1"), "overlaps 3 ops; a pair has two"),
    (SOUND.replace("F0 BW0", "F0& BW0"), "line 7: '' is no op"),
    (SOUND.replace("F0 BW0", "F0^1 BW0"), "names a weight version"),
    (SOUND.replace("path: 0 1", "path: 0 5"), "stage 1 on rank 5; ranks are 0 to 1"),
    (SOUND.replace("path: 0 1", "path: 0 1\npath: 1"), "path 1 has 1 stages and path 0 has 2"),
    (SOUND.replace("path: 0 1", "path: 0 1\npath: 1 0"), "`paths of micro-batches:` is missing"),
    (SOUND.replace("path: 0 1", "path: 0 1 1 0"), "'F0' needs its stage"),
    (SOUND.replace("name: s", "name: s\npaths of micro-batches: 0*1"), "names 1 of 2 micro-batches"),
    (SOUND.replace("name: s", "name: s\npaths of micro-batches: 1*2"), "expected PATH*COUNT"),
    (SOUND.replace("name: s", "name: s\nslices: 2 diagonal"), "cut along 'diagonal'; expected one of sequence, batch"),
    (SOUND.replace("name: s", "name: s\nasynchronous: no"), "asynchronous is 'no'"),
    (SOUND.replace("name: s", "name: s\npaths of micro-batches: 0*1 0*²"), "'0*²'; expected PATH*COUNT"),
    (SOUND.replace("name: s", "name: s\npaths of micro-batches: 0*" + "9" * 5000), "expected PATH*COUNT"),
    (SOUND.replace("F0 BW0", "F٢ BW0"), "'F٢' is no op"),
    (SOUND.replace("path: 0 1", "path: 0 1\n" * 200), "has 200 paths; up to 30"),
    (SOUND.replace("name: s", "name: a\x07b"), "up to 200 printable characters"),
    ("stageloom schedule 1\n  F0\n", "line 2: an indented line goes on with a rank's ops"),
    (HEAD.replace("microbatches: 2", "microbatches: 9999999").replace("ranks: 2", "ranks: 500")
     .replace("path: 0 1", "path: " + "0 1 " * 100), "is too large"),
]  # fmt: skip

JSONS: list[tuple[str, str]] = [
    ("", "is not JSON"),
    ("{", "line 1, column 2: is not JSON"),
    ("[]", "holds no JSON object"),
    ("{}", "key format: is None"),
    ('{"format": "stageloom schedule", "version": 2}', "format version 2"),
    (JSON_HEAD + '"ranks": 2.5, "microbatches": 2, "paths": [[0, 1]], "tapes": []}', "key ranks is 2.5"),
    ('{"format": "stageloom schedule", "format": 1}', "key 'format' is said twice"),
    ("[" * 100_000, "nested too deeply"),
    ('{"ranks": ' + "9" * 5000 + "}", "integer string conversion"),
    ('{"format": "stageloom schedule", "version": 1, "name": null}', "key name: is None; a text is needed"),
    (JSON_HEAD.replace('"s"', '"a\\nb"') + '"ranks": 1, "microbatches": 1, "paths": [[0]], "tapes": []}', "printable"),
    (JSON_HEAD.replace('"s"', '"\\ud800"') + '"ranks": 1, "microbatches": 1, "paths": [[0]], "tapes": []}', "print"),
    (JSON_HEAD + '"ranks": true, "microbatches": 2, "paths": [[0, 1]], "tapes": []}', "key ranks is True"),
    (JSON_HEAD + '"ranks": 2, "microbatches": 2, "paths": [0, 1], "tapes": []}', "key paths: is not a list of lists"),
    (JSON_HEAD + '"ranks": 2, "microbatches": 2, "paths": [[0, "1x"]], "tapes": []}', "key paths: a rank is '1x'"),
    (JSON_HEAD + '"ranks": 2, "microbatches": 2, "paths": [[0, 1]], "tapes": "F0"}', "key tapes: is not a list"),
    (JSON_HEAD + '"ranks": 2, "microbatches": 2, "paths": [[0, 1]], "tapes": [["F0", 7]]}', "item 1: '7' is no op"),
    (JSON_HEAD + '"ranks": 2, "microbatches": 2, "paths": [[0, 1]], "tapes": [], "x": 1}', "unknown key 'x'"),
    (JSON_HEAD + '"ranks": 2, "microbatches": 2, "paths": [[0, 1]], "paths of micro-batches": 5, "tapes": []}',
     "key paths of micro-batches"),
]  # fmt: skip

# text of a cost file -> a part of the message
COSTS: list[tuple[str, str]] = [
    ("", "holds no mapping"),
    ("- 1\n- 2\n", "holds no mapping"),
    ("F: [1, 2\n", "is not YAML"),
    ("F: fast\n", "F: Input should be a valid number"),
    ('F: "1"\n', "F: Input should be a valid number, not text, got '1'"),
    ("F: -1\n", "F: Input should be greater than or equal to 0, got -1"),
    ("F: .nan\n", "F: Input should be a finite number"),
    ("F: [1, -2]\n", "F.1: Input should be greater than or equal to 0, got -2"),
    ("F: []\n", "F: List should have at least 1 item"),
    ("F: [1, 2, 3]\n", "F has 3 values and the schedule has 4 stages"),
    ("Forward: 1\n", "Forward: unknown key; known keys: unit, F, B, W"),
    ("unit: hours\n", "unit: Input should be 's', 'ms' or 'us', got 'hours'"),
    ("stragglers: {9: 2.0}\n", "stragglers.9: the schedule has ranks 0 to 3"),
    ("stragglers: {0: 0}\n", "stragglers.0: Input should be greater than 0"),
    ("links: [{from: 0, to: 9}]\n", "links.0: from 0 to 9"),
    ("links: [{from: 0}]\n", "links.0.to: Field required"),
    ("links: [{from: 0, to: 1, speed: 1}]\n", "links.0.speed: unknown key"),
    ("message_bytes: 5\n", "without a bandwidth"),
    ("overlap_time: 3\noverlap_fraction: 0.5\n", "the same thing twice"),
    ("F: [1, 2]\noverlap_time: 5\n", "give overlap_fraction instead"),
    ("anatomy: {attention: 1}\n", "anatomy.dispatch: Field required"),
    ("anatomy: {attention: 1, dispatch: 1, mlp: 1, combine: 1}\nF: 2\n", "so F cannot be given as well"),
    ("anatomy: {attention: 1, dispatch: 1, mlp: 1, combine: 1, sm_share: 1.5}\n", "anatomy.sm_share"),
    ("anatomy: 7\n", "anatomy"),
    ("F: 0\nB: 0\nW: 0\n", "nothing to simulate"),
    ("tokens: -4\n", "tokens: Input should be greater than 0"),
    ("F: &a [*a]\n", "F"),
    ("F: 1\nF: 5\n", "line 2: key 'F' is said twice"),
    ("F: true\n", "F: Input should be a number, not true"),
    ("F: 1:30\n", "F: Input should be a valid number"),
    ("F: [yes, no, 1, 1]\n", "F.0: Input should be a valid number"),
    ("stragglers: {true: 2}\n", "Input should be a number, not true"),
    ("links: [{from: 0, to: 0, latency: 5}]\n", "from rank 0 to itself"),
    ("links: [{from: 0, to: 1, latency: 5}, {from: 0, to: 1, latency: 6}]\n", "is given twice"),
    ("bandwidth: 5\n", "message_bytes is 0"),
    ("F: [4]\noverlap_time: 2\n", "give overlap_fraction instead"),
    ("overlap_time: 2\nBW: [1, 2, 3, 4]\n", "give overlap_fraction instead"),
    ("stragglers: {0: 1.0e+308}\n", "from 1e-100 to 1e+100"),
    ("message_bytes: 1\nbandwidth: 1.0e-320\n", "from 1e-100"),
    ("anatomy: {attention: 1.0e+308, dispatch: 1, mlp: 1, combine: 1}\n", "anatomy.attention"),
    ("F: " + "9" * 5000 + "\n", "integer string conversion"),
    ("F: 1\0\n", "is not YAML"),
    ('"a\\nb": 1\n', "unknown key"),
]


def check(arguments: list[str], message: str) -> None:
    result = stageloom(*arguments)
    assert result.status == 2, result
    assert result.err.startswith("error: "), result
    assert message in result.err, result
    assert "Traceback" not in result.err
    assert result.out == ""
    assert len(result.err.strip().splitlines()) == 1, result.err


@pytest.mark.parametrize(("arguments", "message"), INVOCATIONS)
def test_wrong_invocation(arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "sound.loom").write_text(SOUND)
    check([word.replace("{tmp}", str(tmp_path)).replace("{long}", "x" * 300) for word in arguments.split()], message)
    assert [path.name for path in tmp_path.iterdir()] == ["sound.loom"]


@pytest.mark.parametrize(("text", "message"), LOOMS)
@pytest.mark.parametrize("verb", ["simulate", "validate"])
def test_wrong_loom_file(verb: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.loom"
    file.write_text(text)
    check([verb, str(file)], message)


@pytest.mark.parametrize(("text", "message"), JSONS)
def test_wrong_json_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    check(["validate", str(file)], message)


@pytest.mark.parametrize(("text", "message"), COSTS)
def test_wrong_cost_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    check(["simulate", "1f1b", "-p", "4", "-m", "8", "--costs", str(file)], message)
    assert str(file) in stageloom("simulate", "1f1b", "-p", "4", "-m", "8", "--costs", str(file)).err


@pytest.mark.parametrize("suffix", [".loom", ".json", ".yaml"])
def test_binary_files(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"binary{suffix}"
    file.write_bytes(b"\x80\x81\xff\x00")
    if suffix == ".yaml":
        check(["compare", "-p", "2", "-m", "2", "--costs", str(file)], "is not UTF-8 text")
    else:
        check(["validate", str(file)], "is not UTF-8 text")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "rank 0: F0 F1 BW0\nrank 1: F0 BW0 F1 BW1\n", "no B and no W of micro-batch 1"),
        (HEAD + "rank 0: F0 F1 BW0 BW1\nrank 1: BW0 F0 F1 BW1\n", "BW0"),
        (HEAD + "rank 0: BW0 F0 F1 BW1\nrank 1: F0 BW0 F1 BW1\n", "cannot run"),
        (HEAD + "rank 0: F0 BW1 F1 BW0\nrank 1: F1 BW1 F0 BW0\n", "cannot run"),
    ],
)
def test_a_file_whose_schedule_cannot_run_is_refused_by_the_simulator(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "unsound.loom"
    file.write_text(text)
    check(["simulate", str(file)], message)
    assert stageloom("validate", str(file)).status == 1


def test_a_pipe_or_device_is_no_file_to_read(tmp_path: Path) -> None:
    """Reading one could wait for ever."""
    pipe = tmp_path / "pipe.loom"
    os.mkfifo(pipe)
    check(["validate", str(pipe)], "is not a regular file")
    check(["compare", "-p", "2", "-m", "2", "--costs", str(pipe)], "is not a regular file")
    check(["compare", "-p", "2", "-m", "2", "--costs", "/dev/zero"], "is not a regular file")


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.svg").symlink_to(tmp_path / "b.svg")
    (tmp_path / "b.svg").symlink_to(tmp_path / "a.svg")
    check(
        ["show", "1f1b", "-p", "2", "-m", "2", "-o", str(tmp_path / "a.svg")],
        "is a loop of links",
    )


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process and a shell of its own, where standard output can be something else."""
    known = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    return subprocess.run(
        ["bash", "-c", command.replace("stageloom", f"{sys.executable} -m stageloom")],
        capture_output=True,
        text=True,
        errors="replace",
        env=known | environment,
        timeout=60,
    )


def test_a_full_disk_and_a_closed_output_are_named() -> None:
    full = run("stageloom compare -p 2 -m 2 > /dev/full")
    assert (full.returncode, full.stderr) == (2, "error: standard output: cannot be written: No space left on device\n")
    closed = run("stageloom compare -p 2 -m 2 >&-")
    assert (closed.returncode, "Traceback" in closed.stderr) == (2, False)


def test_a_reader_that_goes_away_is_no_error() -> None:
    gone = run("stageloom show 1f1b -p 16 -m 64 --format trace | head -c 10; exit ${PIPESTATUS[0]}")
    assert (gone.returncode, gone.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_without_block_letters_gets_plain_marks(encoding: str) -> None:
    for command in ("compare -p 4 -m 8", "show dualpipe -p 4 -m 8", "list", "show 1f1b -p 2 -m 2 --format svg"):
        plain = run(f"stageloom {command}", PYTHONIOENCODING=encoding)
        assert (plain.returncode, plain.stderr) == (0, ""), command
    assert "##" in run("stageloom compare -p 4 -m 8", PYTHONIOENCODING="ascii").stdout


@pytest.mark.parametrize("columns", ["1", "20", "40", "72", "80", "200", "0", "-5", "abc", "\u00b2"])
def test_no_width_cuts_a_number_or_fails(columns: str) -> None:
    for command in (
        "compare -p 8 -m 16 --unit ms --tokens 3072",
        "simulate zb-h1 -p 4 -m 8",
        "show dualpipe -p 4 -m 8",
    ):
        shown = run(f"stageloom {command}", COLUMNS=columns)
        assert shown.returncode == 0, shown.stderr
        if not command.startswith("show"):
            assert "…" not in shown.stdout
    wide = 120 if columns in ("0", "-5", "abc", "\u00b2") else max(int(columns), 60)
    table = run("stageloom compare -p 8 -m 16 --unit ms --tokens 3072", COLUMNS=columns).stdout.splitlines()
    rows = [line for line in table if line.startswith(("zb-v", "1f1b", "interleaved-1f1b"))]
    assert len(rows) == 3
    assert max(map(len, rows)) <= wide


def test_brackets_in_a_name_are_not_markup(tmp_path: Path) -> None:
    file = tmp_path / "[red]x[" / "x.loom"
    file.parent.mkdir()
    file.write_text(SOUND.replace("name: s", "name: [bold]x[/]"))
    assert "[bold]x[/]" in stageloom("simulate", str(file)).out
    assert "[bold]x[/]" in stageloom("show", str(file)).out
    assert "[red]x[" in stageloom("validate", str(file)).out
