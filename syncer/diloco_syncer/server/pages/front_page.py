"""The page at ``/``: what a person with a browser sees of the job, from its status document.

One file without anything from elsewhere, the same for every job. Its script asks ``/status`` every two seconds and
writes what it reads as text, never as markup: names and messages come from jobs and learners. The page's
Content-Security-Policy allows that one script, its own styles, and connections to where it came from.
"""

from __future__ import annotations

import base64
import hashlib

from diloco_protocol.common.http_server import Answer

SCRIPT = """
"use strict";
const byId = (id) => document.getElementById(id);
const count = (value) => value === null ? "-" : Math.round(value).toLocaleString("en");
const loss = (value) => value === null ? "-" : value.toFixed(3);
const percent = (value) => value === null ? "-" : (100 * value).toFixed(1) + " %";
function span(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return whole + " s";
  if (whole < 3600) return Math.floor(whole / 60) + " min " + whole % 60 + " s";
  return Math.floor(whole / 3600) + " h " + Math.floor(whole % 3600 / 60) + " min";
}
function size(bytes) {
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (bytes >= factor) return (bytes / factor).toPrecision(3) + " " + unit;
  return bytes + " B";
}
function fill(id, rows) {
  byId(id).replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => {
      const box = document.createElement("td");
      box.textContent = cell;
      return box;
    }));
    return row;
  }));
}
function progress(status) {
  const stop = status.stop;
  if (stop === null) return ["", 0];
  const reached = {steps: status.step, tokens: status.tokens.trained, seconds: status.elapsed_seconds}[stop.kind];
  const share = Math.min(1, reached / stop.limit);
  let text = count(reached) + " of " + count(stop.limit) + " " + stop.kind + " (" + Math.floor(100 * share) + " %)";
  let left = null;
  if (stop.kind === "tokens" && status.tokens_per_second) left = (stop.limit - reached) / status.tokens_per_second;
  if (stop.kind === "seconds") left = stop.limit - reached;
  if (stop.kind === "steps") {
    const ahead = status.slots.find((slot) => slot.state === "active" && slot.step === status.step);
    if (ahead && ahead.step_seconds) left = (stop.limit - reached) * ahead.step_seconds;
  }
  if (left !== null && left > 0 && status.phase === "training") text += ", about " + span(left) + " left";
  return [text, share];
}
function curve(rows) {
  const points = rows.filter((row) => row[1] !== null);
  byId("loss-box").hidden = points.length < 2;
  if (points.length < 2) return;
  const values = points.map((point) => point[1]);
  const low = Math.min(...values), high = Math.max(...values), last = points[points.length - 1][0] || 1;
  const at = (point) => (600 * point[0] / last).toFixed(1) + "," +
    (150 - 140 * (point[1] - low) / (high - low || 1)).toFixed(1);
  byId("line").setAttribute("points", points.map(at).join(" "));
  byId("loss-text").textContent = "merged model: " + loss(values[0]) + " at " + count(points[0][0]) + " tokens, " +
    loss(values[values.length - 1]) + " at " + count(last) + " (between " + loss(low) + " and " + loss(high) + ")";
}
function show(status) {
  document.title = status.job + ": " + status.phase;
  byId("job").textContent = status.job;
  byId("phase").textContent = status.phase;
  byId("message").textContent = status.store_problem || status.message;
  const [text, share] = progress(status);
  byId("progress").textContent = text;
  byId("done").value = share;
  const scores = status.eval_loss;
  fill("figures", [
    ["time", span(status.elapsed_seconds)],
    ["tokens per second", count(status.tokens_per_second)],
    ["loss of the merged model", loss(scores.length ? scores[scores.length - 1][1] : null)],
    ["learners", status.quorum.active + " active, " + status.quorum.required + " needed" +
      (status.standby ? ", " + status.standby + " standing by" : "")],
    ["merges", count(status.merges)],
    ["tokens", count(status.tokens.trained) + " trained, " + count(status.tokens.merged) + " merged, " +
      count(status.tokens.pending) + " pending, " + count(status.tokens.dropped) + " dropped"],
    ["learners' time in the merged model", percent(status.goodput)],
    ["traffic", size(status.bytes_up) + " up, " + size(status.bytes_down) + " down"],
  ]);
  fill("learners", status.slots.map((slot) => [
    slot.region ? slot.region + "-" + slot.ordinal : "-",
    slot.state + (slot.diverged ? ", diverged" : slot.paused ? ", paused" : ""),
    count(slot.step), count(slot.tokens), loss(slot.loss), slot.step_seconds ? slot.step_seconds.toFixed(3) : "-",
    count(slot.merged_pushes), slot.link && slot.link.too_slow ? "slow link: " + slot.link.message : "",
  ]));
  curve(scores);
  fill("events", status.events.slice(-50).reverse().map((event) => [
    new Date(1000 * event.time).toLocaleTimeString(), event.kind, event.message,
  ]));
}
async function look() {
  try {
    const answer = await fetch("status", {cache: "no-store"});
    if (!answer.ok) throw new Error("status " + answer.status);
    show(await answer.json());
    byId("silence").textContent = "";
  } catch (error) {
    byId("silence").textContent = "The syncer does not answer (" + error.message + "). Below is what was last seen.";
  }
  setTimeout(look, 2000);
}
look();
"""

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.4 system-ui, sans-serif; max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
#phase { font-weight: 600; } #message { color: #b07000; } #silence { color: #c03030; }
progress { width: 100%; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; }
th { font-weight: 400; opacity: .65; } .numbers td { font-variant-numeric: tabular-nums; }
svg { width: 100%; height: 10rem; } polyline { fill: none; stroke: currentColor; stroke-width: 1.5; }
.scroll { overflow-x: auto; }
"""

_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)

HTML = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>diloco</title>
<style>{STYLE}</style>
</head>
<body>
<h1 id="job">diloco</h1>
<p><span id="phase"></span> <span id="message"></span></p>
<p id="silence"></p>
<noscript><p>This page needs JavaScript. The same as JSON: <a href="status">status</a>.</p></noscript>
<p id="progress"></p>
<progress id="done" max="1" value="0"></progress>
<table><tbody id="figures"></tbody></table>
<h2>Learners</h2>
<div class="scroll"><table class="numbers"><thead><tr><th>learner</th><th>state</th><th>step</th><th>tokens</th>
<th>loss</th><th>s/step</th><th>merged</th><th></th></tr></thead><tbody id="learners"></tbody></table></div>
<div id="loss-box" hidden><h2>Loss against tokens</h2>
<svg viewBox="0 0 600 160" preserveAspectRatio="none" role="img" aria-labelledby="loss-text"><polyline id="line"/></svg>
<p id="loss-text"></p></div>
<h2>Events, the newest first</h2>
<div class="scroll"><table><tbody id="events"></tbody></table></div>
<h2>Pages for programs</h2>
<p><a href="status">status</a> · <a href="report">report</a> · <a href="metrics">metrics</a> ·
<a href="healthz">healthz</a> · <a href="readyz">readyz</a></p>
</body>
</html>
""".encode()


def front_page() -> Answer:
    return 200, "text/html; charset=utf-8", HTML
