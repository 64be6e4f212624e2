"use strict";
const canvas = document.getElementById("tracks"), statusLine = document.getElementById("status"), LEFT = 130, ROW = 17, GAP = 7, FOOT = 22;
const waits = new Set(timeline.waits), names = timeline.names;
let last = 1, y = 4;
const rows = timeline.tracks.map((track, n) => {
  if (n && track.block !== timeline.tracks[n - 1].block) y += GAP;
  const row = {...track, y};
  y += ROW;
  for (let i = 0; i < track.steps.length; i += 3) last = Math.max(last, track.steps[i + 1] + track.steps[i + 2]);
  return row;
});
const height = y + FOOT;
let from = 0, to = Math.max(1, until || last), drag = null;
canvas.style.height = height + "px";

function draw() {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, style = getComputedStyle(document.documentElement);
  canvas.width = width * scale;
  canvas.height = height * scale;
  const c = canvas.getContext("2d"), x = tick => LEFT + (tick - from) / (to - from) * (width - LEFT);
  c.scale(scale, scale);
  c.fillStyle = style.getPropertyValue("--paper");
  c.fillRect(0, 0, width, height);
  c.font = "11px system-ui, sans-serif";
  for (const row of rows) {
    for (let i = 0; i < row.steps.length; i += 3) {
      const begin = x(row.steps[i + 1]), end = x(row.steps[i + 1] + row.steps[i + 2]), name = names[row.steps[i]];
      if (end < LEFT || begin > width) continue;
      const low = waits.has(name), left = Math.max(LEFT, begin), w = Math.max(0.5, end - left - (end - begin > 4 ? 0.5 : 0));
      c.fillStyle = colours[name];
      c.fillRect(left, row.y + (low ? 6 : 1), w, low ? 4 : ROW - 3);
    }
    c.fillStyle = style.getPropertyValue("--faint");
    c.fillText("block " + row.block + " warp " + row.warp, 4, row.y + 12);
  }
  for (let n = 0; n <= 8; ++n) {
    const tick = from + (to - from) * n / 8;
    c.textAlign = n === 8 ? "right" : n ? "center" : "left";
    c.fillText(Math.round(tick) + (n ? "" : " " + timeline.unit), x(tick), height - 6);
  }
  c.textAlign = "left";
}
function look(a, b) {
  const span = Math.min(Math.max(b - a, 4), last);
  from = Math.max(0, Math.min(a, last - span));
  to = from + span;
  draw();
}
const zoom = (factor, at = (from + to) / 2) => look(at - (at - from) * factor, at + (to - at) * factor);
const tickAt = e => from + (e.offsetX - LEFT) / (canvas.clientWidth - LEFT) * (to - from);
canvas.addEventListener("wheel", e => { e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, tickAt(e)); }, {passive: false});
canvas.addEventListener("pointerdown", e => { drag = {x: e.offsetX, from, to}; canvas.setPointerCapture(e.pointerId); });
canvas.addEventListener("pointerup", () => drag = null);
canvas.addEventListener("pointermove", e => {
  if (drag) {
    const moved = (e.offsetX - drag.x) / (canvas.clientWidth - LEFT) * (drag.to - drag.from);
    look(drag.from - moved, drag.to - moved);
    return;
  }
  const row = rows.find(r => e.offsetY >= r.y && e.offsetY < r.y + ROW), tick = tickAt(e);
  if (!row) return;
  for (let i = 0; i < row.steps.length; i += 3)
    if (tick >= row.steps[i + 1] && tick < row.steps[i + 1] + row.steps[i + 2])
      statusLine.textContent = "block " + row.block + (row.sm === null ? "" : " (SM " + row.sm + ")") + " warp " + row.warp + ": " + names[row.steps[i]] + ", "
        + row.steps[i + 2] + " " + timeline.unit + " from " + row.steps[i + 1] + " on";
});
canvas.addEventListener("keydown", e => {
  const step = (to - from) / 5;
  const keys = {ArrowLeft: () => look(from - step, to - step), ArrowRight: () => look(from + step, to + step),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: () => look(0, last)};
  if (!(e.key in keys)) return;
  keys[e.key]();
  statusLine.textContent = "from " + Math.round(from) + " to " + Math.round(to) + " " + timeline.unit;
  e.preventDefault();
});
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
