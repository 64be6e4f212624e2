"use strict";
const number = text => { const found = text.replaceAll(",", "").match(/-?[\d.]+(e[-+]?\d+)?/); return found ? parseFloat(found[0]) : NaN; };
const unit = {"µs": 1e-6, "ms": 1e-3, "s": 1, "KiB": 1024, "kB": 1e3, "MB": 1e6, "GB": 1e9};
const value = text => number(text) * (unit[text.trim().split(/\s+/)[1]] ?? 1);
for (const table of document.querySelectorAll("table.sortable"))
  [...table.tHead.rows[0].cells].forEach((head, n) => {
    if (!head.textContent) return;
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows], text = row => row.cells[n].textContent;
      const order = (a, b) => {
        const x = value(text(a)), y = value(text(b));
        return isNaN(x) || isNaN(y) ? (isNaN(x) - isNaN(y)) || text(a).localeCompare(text(b)) : x - y;
      };
      rows.sort((a, b) => down ? order(b, a) : order(a, b));
      table.tBodies[0].append(...rows);
    });
  });
