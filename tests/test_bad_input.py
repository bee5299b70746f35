"""Wrong invocations and wrong files: each ends with status 2 and one message that names what, where and the remedy."""

from __future__ import annotations

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
    ("compare -p 8 -m 8 --only nonsense", "no schedule named 'nonsense'"),
    ("simulate 1fib -p 4 -m 8", "did you mean 1f1b"),
    ("simulate dualpip -p 4 -m 8", "did you mean dualpipe"),
    ("simulate xyzzy -p 4 -m 8", "no schedule named 'xyzzy'; known: 1f1b"),
    ("simulate dualpipe -p 3 -m 8", "need an even number; nearest: 2 or 4 ranks"),
    ("simulate dualpipe -p 1 -m 8", "nearest: 2 ranks"),
    ("simulate dualpipe -p 4 -m 6", "at least 2P = 8; nearest: 8"),
    ("simulate dualpipe -p 4 -m 9", "needs an even number; nearest: 8 or 10"),
    ("simulate dualpipev -p 4 -m 7", "at least 2P = 8; nearest: 8"),
    ("simulate chimera -p 5 -m 8", "nearest: 4 or 6 ranks"),
    ("simulate pipedream-2bw -p 4 -m 8 -O minibatch=3", "nearest: minibatch = 4"),
    ("simulate 1f1b -p 4 -m 8 -v 2", "no option 'chunks'; its options: none"),
    ("simulate interleaved-1f1b -p 4 -m 8 -v 0", "chunks = 0; a whole number of at least 1"),
    ("simulate interleaved-1f1b -p 4 -m 8 -v x", "'x' is not a whole number"),
    ("simulate interleaved-1f1b -p 4 -m 8 -v 2 -O chunks=3", "the same thing twice"),
    ("simulate gpipe -p 4 -m 8 -O order=sideways", "expected one of reverse, in-order"),
    ("simulate gpipe -p 4 -m 8 -O order", "expected NAME=VALUE"),
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
    check([word.replace("{tmp}", str(tmp_path)) for word in arguments.split()], message)
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
    assert "wrong.yaml" in stageloom("simulate", "1f1b", "-p", "4", "-m", "8", "--costs", str(file)).err or (
        "costs: " in stageloom("simulate", "1f1b", "-p", "4", "-m", "8", "--costs", str(file)).err
    )


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
