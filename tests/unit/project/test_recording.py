"""tools/recording.py: what a terminal showed, as a picture that plays."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import recording
from recording import Recording

PROGRAM = """
import shutil, sys, time
print(sys.stdout.isatty(), shutil.get_terminal_size().columns)
for step in range(5):
    print(f"\\r\\033[1;32mstep {step}\\033[0m  <loss> & {5 - step}", end="", flush=True)
    time.sleep(0.2)
print("\\nends")
"""
SVG = "{http://www.w3.org/2000/svg}"


def record(folder: Path, program: str, *more: str) -> int:
    words = ["--svg", str(folder / "run.svg"), "--cast", str(folder / "run.cast"), "--size", "40x6", *more]
    return recording.main([*words, "--", sys.executable, "-c", program])


def words_of(line: ElementTree.Element) -> str:
    return " ".join(span.text or "" for span in line.iter(f"{SVG}tspan"))


def test_a_command_is_recorded_as_a_terminal_showed_it(tmp_path: Path) -> None:
    assert record(tmp_path, PROGRAM, "--seconds", "4") == 0
    root = ElementTree.parse(tmp_path / "run.svg").getroot()
    lines = {
        f"#{group.get('id')}": words_of(group) for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("l")
    }
    frames = [
        [lines[use.get("href", "")] for use in group.iter(f"{SVG}use")]
        for group in next(g for g in root.iter(f"{SVG}g") if g.get("id") == "strip")
    ]
    assert frames[-1] == ["True 40", "step 4 <loss> & 1", "ends"], "a line that was written over is as it was last"
    assert len(frames) >= 2 and all(one != following for one, following in itertools.pairwise(frames))
    style = next(root.iter(f"{SVG}style")).text or ""
    shares = [float(share) for share in re.findall(r"([\d.]+)%\{", style)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 100 and len(shares) == len(frames) + 1
    green = [span for span in root.iter(f"{SVG}tspan") if (span.text or "").startswith("step")]
    assert {(span.get("fill"), span.get("font-weight")) for span in green} == {(recording.COLOURS["green"], "bold")}


def test_a_recording_is_rendered_again_from_its_file(tmp_path: Path) -> None:
    assert record(tmp_path, PROGRAM, "--title", "it") == 0
    cast = (tmp_path / "run.cast").read_text()
    assert Recording.from_cast(cast).to_cast() == cast
    again = ["--svg", str(tmp_path / "again.svg"), "--from-cast", str(tmp_path / "run.cast"), "--title", "it"]
    assert recording.main(again) == 0
    frames = [len(re.findall("<use ", (tmp_path / name).read_text())) for name in ("run.svg", "again.svg")]
    assert frames[0] == frames[1] > 0


def test_a_long_recording_has_no_more_frames_than_it_may_and_says_how_fast_it_plays() -> None:
    told = Recording(20, 3, tuple((float(at), f"\r{at:4}") for at in range(1, 1001)))
    assert len(recording.take_frames(told, 50)) <= 51
    assert recording.take_frames(told, 50)[-1][1][0][0].text == "1000"
    picture = recording.render(told, 20, 50, "make demo")
    assert "make demo: 1000 s, played 59 times as fast" in picture


def test_a_recording_does_not_show_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert record(tmp_path, "import os; print('in ' + os.getcwd() + '/runs')", "--size", "200x6") == 0
    for name in ("run.svg", "run.cast"):
        text = (tmp_path / name).read_text()
        assert "…/runs" in text and str(tmp_path) not in text


def test_nor_where_its_name_came_in_parts() -> None:
    texts = ("a /", "work/he", "re/runs /w", "orks /work", "/here", " /work/h")
    told = Recording(20, 3, tuple((float(at), text) for at, text in enumerate(texts)))
    shown = told.without(Path("/work/here"))
    assert "".join(text for _, text in shown.events) == "a …/runs /works … /work/h"
    assert [at for at, _ in shown.events] == sorted(at for at, _ in shown.events)


def test_a_command_that_fails_leaves_no_picture(tmp_path: Path) -> None:
    assert record(tmp_path, "print('no'); raise SystemExit(7)") == 7
    assert not (tmp_path / "run.svg").exists()
