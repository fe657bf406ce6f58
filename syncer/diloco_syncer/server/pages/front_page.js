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
function rate(bytesPerSecond) {
  for (const [factor, unit] of [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"]])
    if (8 * bytesPerSecond >= factor) return (8 * bytesPerSecond / factor).toPrecision(3) + " " + unit;
  return Math.round(8 * bytesPerSecond) + " bit/s";
}
const STYLES = {active: "well", suspect: "warning", draining: "warning", lost: "wrong",
  failed: "wrong", holding: "warning", "process-ended": "wrong", joined: "well", dropped: "warning",
  "shard-lost": "wrong", "shard-ready": "well", "syncer-restart": "warning", away: "wrong", failing: "warning"};
function fill(id, rows) {
  byId(id).replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => {
      const box = document.createElement("td");
      box.textContent = cell;
      box.className = STYLES[cell] || "";
      return box;
    }));
    return row;
  }));
}
function progress(status) {
  const stop = status.stop;
  if (stop === null) return "";
  const reached = {steps: status.step, tokens: status.tokens.trained, seconds: status.elapsed_seconds}[stop.kind];
  const text = count(reached) + " of " + count(stop.limit) + " " + stop.kind;
  const left = status.seconds_left ? ", about " + span(status.seconds_left) + " left" : "";
  return text + " (" + Math.floor(100 * status.progress) + " %)" + left;
}
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push(n * step);
  return [found, Math.max(0, -Math.floor(Math.log10(step)))];
}
function short(tokens) {
  for (const [factor, unit] of [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k"]])
    if (tokens >= factor) return Number((tokens / factor).toPrecision(3)) + unit;
  return String(tokens);
}
function draw(name, attributes, text) {
  const made = document.createElementNS(byId("plot").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
// The first tenth of the tokens, in which the loss falls most, does not set the scale: its line may leave at the top.
// Of fewer than four scores all do.
function curve(rows) {
  const points = rows.filter((row) => row[1] !== null);
  byId("loss-box").hidden = points.length < 2;
  if (points.length < 2) return;
  const first = points[0], last = points[points.length - 1], end = last[0] || 1;
  const values = points.map((point) => point[1]);
  const few = points.length < 4;
  const later = points.filter((point, n) => few || n > 0 && point[0] >= end / 10).map((point) => point[1]);
  const low = Math.min(...values), margin = 0.08 * (Math.max(...later) - low) || 0.05;
  const bottom = low - margin, top = Math.max(...later) + margin;
  const plot = byId("plot"), width = plot.clientWidth || 600, height = plot.clientHeight || 192, left = 52, below = 22;
  const x = (tokens) => left + (width - left - 8) * tokens / end;
  const y = (value) => 8 + (height - below - 8) * (top - value) / (top - bottom);
  const [levels, digits] = ticks(bottom, top, 7), [marks] = ticks(0, end, width < 500 ? 3 : 7);
  const line = points.map((point) => x(point[0]).toFixed(1) + "," + y(point[1]).toFixed(1)).join(" ");
  const window = draw("clipPath", {id: "window"});
  window.append(draw("rect", {x: left, y: 0, width: width - left, height: height - below}));
  plot.setAttribute("viewBox", "0 0 " + width + " " + height);
  plot.replaceChildren(window,
    ...levels.map((level) => draw("line", {x1: left, x2: width, y1: y(level), y2: y(level)})),
    ...levels.map((level) => draw("text", {x: left - 6, y: y(level) + 4, "text-anchor": "end"}, level.toFixed(digits))),
    ...marks.map((mark) => draw("text",
      {x: x(mark), y: height - 6, "text-anchor": mark > 0.95 * end ? "end" : "middle"}, short(mark))),
    draw("polyline", {points: line, "clip-path": "url(#window)"}));
  byId("loss-text").textContent = loss(first[1]) + " at " + count(first[0]) + " tokens, " + loss(last[1]) + " at " +
    count(last[0]) + (first[1] > top ? "; the scale leaves out where it began" : "");
}
const REPEATING = new Set(["starved", "suspect", "hold", "resume", "round-overdue", "no-steps", "dropped",
  "shard-lost", "shard-ready"]);
// Of what repeats for one slot the newest is shown with the number of times, so that it hides nothing else.
function joined(events) {
  const rows = [], known = new Map();
  for (const event of events.slice().reverse()) {
    const key = event.kind + " " + event.slot + " " + event.message.replace(/[0-9][0-9,.]*/g, "#");
    const row = known.get(key);
    if (row && REPEATING.has(event.kind)) {
      row.times += 1;
      row.since = event.time;
      continue;
    }
    rows.push({event: event, times: 1, since: event.time});
    known.set(key, rows[rows.length - 1]);
  }
  return rows;
}
function clock(seconds) {
  const then = new Date(1000 * seconds), isRecent = Date.now() - then < 20 * 3600 * 1000;
  return isRecent ? then.toLocaleTimeString() : then.toLocaleString();
}
const samples = [];
// Bytes per second up and down over the last looks: some ten seconds.
function traffic(status) {
  const now = Date.now() / 1000;
  const before = samples[samples.length - 1];
  if (before && (before.up > status.bytes_up || before.down > status.bytes_down)) samples.length = 0;
  samples.push({at: now, up: status.bytes_up, down: status.bytes_down});
  if (samples.length > 6) samples.shift();
  const passed = now - samples[0].at;
  if (passed < 1) return ["", ""];
  const [up, down] = [status.bytes_up - samples[0].up, status.bytes_down - samples[0].down];
  return [" (" + rate(up / passed) + " now)", " (" + rate(down / passed) + " now)"];
}
function describe(link) {
  if (!link) return "";
  const parts = link.missing_fragments ? [link.missing_fragments + " fragments to come"] : [];
  if (link.up_bytes_per_second) parts.push(rate(link.up_bytes_per_second) + " up");
  if (link.down_bytes_per_second) parts.push(rate(link.down_bytes_per_second) + " down");
  if (link.round_trip_seconds) parts.push(Math.round(1000 * link.round_trip_seconds) + " ms");
  return (link.too_slow ? "too slow: " : "") + parts.join(", ");
}
function show(status) {
  document.title = status.job + ": " + status.phase;
  byId("job").textContent = status.job;
  byId("phase").textContent = status.phase;
  byId("phase").className = STYLES[status.phase] || "";
  byId("message").textContent = status.store_problem || status.message;
  const waits = ["waiting", "holding", "failed"].includes(status.phase);
  byId("message").className = status.store_problem || waits ? "warning" : "";
  const [up, down] = traffic(status);
  byId("progress").textContent = progress(status);
  byId("done").value = status.progress;
  const scores = status.eval_loss;
  fill("figures", [
    ["time", span(status.elapsed_seconds)],
    ["tokens per second", count(status.tokens_per_second)],
    ["loss of the merged model", loss(scores.length ? scores[scores.length - 1][1] : null)],
    ["learners", status.quorum.active + " active, " + status.quorum.required + " needed" +
      (status.standby ? ", " + status.standby + " standing by" : "")],
    ["merges", count(status.merges) + (status.learners_in_merges
      ? ", of " + status.learners_in_merges.recent.toFixed(1) + " learners each" : "")],
    ["tokens", count(status.tokens.trained) + " trained, " + count(status.tokens.merged) + " merged, " +
      count(status.tokens.pending) + " pending, " + count(status.tokens.dropped) + " dropped"],
    ["learners' time in the merged model", percent(status.goodput)],
    ["traffic", size(status.bytes_up) + " up" + up + ", " + size(status.bytes_down) + " down" + down],
  ]);
  fill("learners", status.slots.map((slot) => [
    (slot.region ? slot.region + "-" + slot.ordinal : "-") + (slot.ranks > 1 ? ", " + slot.ranks + " ranks" : ""),
    slot.state + (slot.diverged ? ", diverged" : slot.paused ? ", paused" : ""),
    count(slot.step), count(slot.tokens), loss(slot.loss), slot.step_seconds ? slot.step_seconds.toFixed(3) : "-",
    count(slot.merged_pushes), describe(slot.link),
  ]));
  byId("shards-box").hidden = !status.shards.length;
  const unserved = new Set(status.rounds.filter((row) => row.unserved).map((row) => row.fragment));
  fill("shards", status.shards.map((shard) => [
    shard.shard, shard.serving ? shard.failures ? "failing" : "there" : shard.fragments.length ? "away" : "not begun",
    shard.fragments.map((fragment) => fragment + (unserved.has(fragment) ? " waits" : "")).join(", ") || "-",
    span(shard.cpu_seconds), size(shard.resident_bytes),
    shard.store_problem || (shard.failures ? shard.failures + " failures: " : "") + shard.message,
  ]));
  curve(scores);
  const problems = new Map();
  for (const slot of status.slots) {
    const said = slot.problem || (slot.link && slot.link.too_slow ? slot.link.message : "");
    if (said) problems.set(said, (problems.get(said) || []).concat(slot.region + "-" + slot.ordinal));
  }
  fill("problems", [...problems].map(([said, names]) => [names.join(", ") + ": " + said]));
  fill("events", joined(status.events).slice(0, 50).map((row) => [
    clock(row.event.time), row.event.kind,
    row.event.message + (row.times > 1 ? " (" + row.times + " times since " + clock(row.since) + ")" : ""),
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
