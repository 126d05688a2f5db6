"use strict";
// A click on a head sorts; text and choices above the table filter.
const board = document.getElementById("board"), body = board.tBodies[0], rows = [...body.rows];
const heads = [...board.tHead.rows[0].cells], names = heads.map((head) => head.textContent);
const value = (row, i) => {
  const order = row.cells[i].dataset.order;  // of numbers; empty where there is none
  return order === undefined ? row.cells[i].textContent : order === "" ? NaN : Number(order);
};
function compare(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  if (typeof a === "string") return a.localeCompare(b);
  return Number.isNaN(a) - Number.isNaN(b) || a - b || 0;
}
function sort(i) {
  const before = heads[i].getAttribute("aria-sort"), numeric = rows.some((row) => typeof value(row, i) === "number");
  const order = before ? (before === "ascending" ? "descending" : "ascending") : numeric ? "descending" : "ascending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[i].setAttribute("aria-sort", order);
  const missing = (row) => Number.isNaN(value(row, i));  // last in either order
  rows.sort((a, b) => missing(a) - missing(b)
    || compare(value(a, i), value(b, i)) * (order === "ascending" ? 1 : -1));
  body.append(...rows);
}
heads.forEach((head, i) => {
  const button = document.createElement("button");
  button.textContent = names[i];
  button.addEventListener("click", () => sort(i));
  head.replaceChildren(button);
});

const filters = document.getElementById("filters"), inputs = [];
function add(name, input) {
  const label = document.createElement("label");
  label.append(name + " ", input);
  filters.append(label);
  inputs.push(input);
  input.addEventListener("input", filter);
}
function filter() {
  for (const row of rows)
    row.hidden = !inputs.every((input) => input.dataset.column
      ? input.value === "" || row.cells[input.dataset.column].textContent === input.value
      : row.textContent.toLowerCase().includes(input.value.toLowerCase()));
}
add("search", Object.assign(document.createElement("input"), { type: "search" }));
for (const name of ["method", "dataset", "backbone", "stream", "leaks"]) {
  const i = names.indexOf(name), select = document.createElement("select");
  select.dataset.column = i;
  select.append(new Option("all", ""), ...[...new Set(rows.map((row) => row.cells[i].textContent))].sort()
    .map((text) => new Option(text)));
  add(name, select);
}
