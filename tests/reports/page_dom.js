// Runs the script of a report in as much of a browser as it uses: node page_dom.js TREE.json SCRIPT.js STEPS.json
// TREE is [tag, attributes, children] with texts as strings. Prints what the figures were given and which rows show.
"use strict";
const fs = require("fs");
const [tree, script, steps] = [2, 3, 4].map((i) => fs.readFileSync(process.argv[i], "utf8"));

class Element {
  constructor(tag, attributes = {}) {
    Object.assign(this, { tag, attributes, children: [], texts: [], parentNode: null, hidden: false, listeners: {} });
    this.dataset = Object.fromEntries(Object.entries(attributes).filter(([name]) => name.startsWith("data-"))
      .map(([name, value]) => [name.slice(5), value]));
    this.classList = { contains: (name) => (attributes.class ?? "").split(" ").includes(name) };
    this.chosen = null;
  }
  get textContent() { return this.texts.join("") + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.children = []; this.texts = [text]; this.chosen = null; }
  get value() {
    if (this.tag !== "select") return this.given ?? "";
    return this.chosen ?? (this.children.length ? this.children[0].value : "");
  }
  set value(value) {
    if (this.tag !== "select") this.given = value;
    else if (this.children.some((child) => child.value === value)) this.chosen = value;
  }
  append(...elements) {
    for (const element of elements) {
      if (element.parentNode) element.parentNode.children = element.parentNode.children.filter((e) => e !== element);
      element.parentNode = this;
      this.children.push(element);
      if (element.tag === "script") loaded.push(element.textContent.length);
    }
  }
  getAttribute(name) { return this.attributes[name] ?? null; }
  setAttribute(name, value) { this.attributes[name] = value; }
  removeAttribute(name) { delete this.attributes[name]; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  closest(tag) { return this.tag === tag ? this : this.parentNode.closest(tag); }
  all() { return this.children.flatMap((child) => [child, ...child.all()]); }
  get tBodies() { return this.children.filter((child) => child.tag === "tbody"); }
  get rows() { return this.children; }
}
const loaded = [];
function grown([tag, attributes, children]) {
  const element = new Element(tag, attributes);
  for (const child of children) {
    if (typeof child === "string") element.texts.push(child);
    else { const below = grown(child); below.parentNode = element; element.children.push(below); }
  }
  return element;
}
const root = grown(JSON.parse(tree));
const selectors = {
  "tr[data-cell]": (e) => e.tag === "tr" && "cell" in e.dataset, "div[data-cell]": (e) => e.tag === "div" && "cell" in e.dataset,
  "#leaderboard thead th": (e) => e.tag === "th" && e.closest("table").attributes.id === "leaderboard",
};
globalThis.document = {
  getElementById: (id) => root.all().find((e) => e.attributes.id === id), createElement: (tag) => new Element(tag),
  querySelectorAll: (selector) => root.all().filter(selectors[selector]), head: root.all().find((e) => e.tag === "head"),
  body: root.all().find((e) => e.tag === "body"),
};
globalThis.window = { addEventListener() {} };
globalThis.location = { hash: JSON.parse(steps).hash ?? "" };
const figures = {};
globalThis.Plotly = { newPlot: (place, traces, layout) => { figures[place.attributes.id] = { data: traces, layout }; } };

process.on("unhandledRejection", (error) => { throw error; });
(0, eval)(script);
setTimeout(() => {
  for (const [id, value] of Object.entries(JSON.parse(steps).choose ?? {})) {
    const select = document.getElementById(id);
    select.value = value;
    select.listeners.change();
  }
  for (const text of JSON.parse(steps).click ?? [])
    document.querySelectorAll("#leaderboard thead th").find((e) => e.textContent === text).listeners.click();
  const rows = (id) => document.getElementById(id).tBodies[0].rows.filter((row) => !row.hidden)
    .map((row) => row.children.map((cell) => cell.textContent));
  console.log(JSON.stringify({ figures, leaderboard: rows("leaderboard"), tests: rows("tests"), loaded,
    errors: document.getElementById("errors").textContent, drawn: document.body.attributes["data-drawn"] ?? "" }));
}, 1500);
