"use strict";
const statusLine = document.getElementById("status"), here = document.getElementById("here");
const code = [...document.querySelectorAll(".i")];
const panes = new Map([...document.querySelectorAll(".code")].map(pane => [pane, [...pane.querySelectorAll(".i")]]));
const instructionsOf = new Map();  // id of a source line -> its instructions
for (const row of code)
  for (const id of row.dataset.l ? row.dataset.l.split(" ") : []) (instructionsOf.get(id) ?? instructionsOf.set(id, []).get(id)).push(row);
const lines = row => (row.dataset.l ? row.dataset.l.split(" ") : []).map(id => document.getElementById("s" + id));
const others = row => row.classList.contains("i") ? lines(row) : instructionsOf.get(row.id.slice(1)) ?? [];
const rowOf = target => target instanceof Element ? target.closest(".s, .i") : null;
let lit = [], pinned = null;

function light(row) {
  for (const old of lit) old.classList.remove("lit", "from");
  lit = [];
  if (!row) return;
  const found = others(row);
  const same = row.classList.contains("i") && found[0] ? instructionsOf.get(found[0].id.slice(1)) : [];  // of the same line
  for (const other of [...found, ...same]) {
    other.classList.add("lit");
    lit.push(other);
    const folded = other.closest("details:not([open])")?.querySelector("summary");
    if (folded) { folded.classList.add("lit"); lit.push(folded); }
  }
  row.classList.add("from");
  lit.push(row);
  const first = row.classList.contains("i") ? row : found[0];
  if (here && first) {
    const x = 1000 * place(first);
    here.setAttribute("x1", x);
    here.setAttribute("x2", x);
  }
  statusLine.textContent = describe(row, found);
}
const side = row => panes.get(row.parentElement);
const place = row => side(row).indexOf(row) / Math.max(1, side(row).length - 1);
function describe(row, found) {
  const name = line => line.closest("details").querySelector("summary").firstChild.textContent.trim() + ":" + line.querySelector("i").textContent;
  const figure = row.querySelector("em").textContent.trim();
  if (row.classList.contains("i")) {
    const live = row.querySelector("u").textContent;
    return found.length ? "from " + found.map(name).join(", by ") + (live ? "; " + live + " registers live" : "") : "no source line";
  }
  const live = Math.max(0, ...found.map(i => +i.querySelector("u").textContent || 0));
  const counts = [...panes.keys()].map(pane => found.filter(i => i.parentElement === pane).length).join(" → ");
  return name(row) + ": " + counts + " instructions" + (figure.endsWith("%") ? ", " + figure : "") + (live ? ", at most " + live + " registers live" : "");
}
function show(row) {
  const folded = row.closest("details:not([open])");
  if (folded) folded.open = true;
  row.scrollIntoView({block: "center"});
}
function bring(row) {  // scroll the other panes to the lines that correspond to the row
  const seen = new Set([row.closest(".pane")]);
  for (const other of others(row)) {
    const pane = other.closest(".pane");
    if (!seen.has(pane)) { seen.add(pane); show(other); }
  }
}
function go(row) {
  for (const old of row.closest(".pane").querySelectorAll('[tabindex="0"]')) old.tabIndex = -1;
  row.tabIndex = 0;
  row.focus();
}
document.addEventListener("pointerover", e => { const row = rowOf(e.target); if (row && !pinned) light(row); });
document.addEventListener("focusin", e => { const row = rowOf(e.target); if (row) { light(row); bring(row); } });
document.addEventListener("click", e => {
  const row = rowOf(e.target);
  if (!row) return;
  pinned = pinned === row ? null : row;
  go(row);
  light(row);
  bring(row);
});
document.addEventListener("keydown", e => {
  const row = rowOf(document.activeElement);
  if (e.key === "Escape") { pinned = null; light(null); return; }
  if (!row) return;
  const visible = [...row.closest(".pane").querySelectorAll(".s, .i")].filter(r => !r.closest("details:not([open])"));
  const n = visible.indexOf(row);
  const steps = {ArrowDown: n + 1, ArrowUp: n - 1, PageDown: n + 20, PageUp: n - 20, Home: 0, End: visible.length - 1};
  if (e.key in steps) go(visible[Math.max(0, Math.min(visible.length - 1, steps[e.key]))]);
  else if (e.key === "Enter") { const other = others(row)[0]; if (other) { show(other); go(other); } }
  else return;
  e.preventDefault();
});
document.getElementById("curves")?.addEventListener("click", e => {
  const last = side(code[code.length - 1]), box = e.currentTarget.getBoundingClientRect();
  const row = last[Math.round((e.clientX - box.left) / box.width * (last.length - 1))];
  show(row);
  go(row);
});
const heat = row => +row.style.getPropertyValue("--h");
function first(pane) {  // initial position: the first change, or the hottest visible line
  const rows = [...pane.querySelectorAll(".s, .i")].filter(r => others(r).length && !r.closest("details:not([open])"));
  return rows.find(r => r.matches(".add, .remove")) ?? rows.reduce((a, b) => heat(b) > heat(a) ? b : a, rows[0]);
}
for (const pane of document.querySelectorAll(".pane")) {  // one tab stop per pane
  const row = first(pane) ?? pane.querySelector(".s, .i");
  if (row) row.tabIndex = 0;
  if (row && pane.id === "source") { show(row); bring(row); }
}
