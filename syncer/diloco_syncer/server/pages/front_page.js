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
    ["merges", count(status.merges) + (status.learners_in_merges
      ? ", of " + status.learners_in_merges.recent.toFixed(1) + " learners each" : "")],
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
