"use strict";
// Everything shown is data of this page; names are written as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const FILTERS = ["dataset", "backbone", "stream"];
const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6BB1", "#A6761D", "#66A61E"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

function complain(message) {
  const line = document.getElementById("errors");
  line.textContent += String(message) + " ";
}
window.addEventListener("error", (event) => complain(event.message));
window.addEventListener("unhandledrejection", (event) => complain(event.reason));

// Plotly reads a few tags and entities in texts.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

const methods = [...new Set(data.cells.flatMap((cell) => cell.variants.map((variant) => variant.title)))];
function look(title) {
  const index = methods.indexOf(title), turn = Math.floor(index / COLORS.length);
  return { color: COLORS[index % COLORS.length], dash: DASHES[turn % DASHES.length], open: turn % 2 === 1 };
}

function chosen() {
  return Object.fromEntries(FILTERS.map((name) => [name, document.getElementById("filter-" + name).value]));
}
function shown(item, values) {
  return FILTERS.every((name) => values[name] === "" || item[name] === values[name]);
}

function fillSelect(select, values, first) {
  for (const [value, text] of [...(first ? [["", first]] : []), ...values]) {
    const option = document.createElement("option");
    option.value = value;
    option.textContent = text;
    select.append(option);
  }
}

function filterRows(values) {
  const cell = document.getElementById("cell").value;
  for (const row of document.querySelectorAll("tr[data-cell]")) {
    const item = data.cells[Number(row.dataset.cell)];
    const one = row.dataset.alone === "yes" && row.dataset.cell !== cell;
    row.hidden = !shown(item, values) || one;
  }
  for (const part of document.querySelectorAll("div[data-cell]")) part.hidden = part.dataset.cell !== cell;
}

function sortBy(heading) {
  const body = heading.closest("table").tBodies[0];
  const column = [...heading.parentNode.children].indexOf(heading);
  const down = heading.getAttribute("aria-sort") !== "descending";
  const value = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
  const number = heading.classList.contains("number");
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");  // what is missing stays at the end
    const order = number ? Number(x) - Number(y) : x.localeCompare(y);
    return down === number ? -order : order;
  };
  const rows = [...body.rows].sort(compare);
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
}

const LAYOUT = { font: { family: "system-ui, DejaVu Sans, sans-serif", size: 12 }, margin: { l: 60, r: 20, t: 55, b: 45 },
  paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "closest" };
const OPTIONS = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
function axis(title, more) {
  return { title: { text: plain(title) }, gridcolor: "#e6e6e6", zeroline: false, automargin: true, ...more };
}
function draw(id, traces, layout) {
  const place = document.getElementById(id);
  place.textContent = "";
  if (!traces.length) { place.textContent = "No record here has these numbers."; return; }
  Plotly.newPlot(place, traces, { ...LAYOUT, ...layout }, OPTIONS);
}

// Small multiples: a panel per block, so that curves of one block share their axis alone.
function drawCurves(cell) {
  const blocks = Math.max(...cell.variants.map((variant) => variant.curves.length));
  const columns = Math.min(blocks, 4), rows = Math.ceil(blocks / columns);
  const layout = { grid: { rows, columns, pattern: "independent", ygap: 0.3 }, height: 300 * rows + 60, annotations: [],
    legend: { orientation: "h", y: -0.32 } };
  const traces = [];
  const longest = Math.max(...cell.variants.flatMap((variant) => variant.curves.map((curve) => curve.length)));
  for (let block = 0; block < blocks; block++) {
    const suffix = block ? String(block + 1) : "";
    layout["xaxis" + suffix] = axis("round", longest <= 10 ? { dtick: 1 } : {});
    layout["yaxis" + suffix] = axis(block % columns ? "" : "validation " + cell.metric);
    layout.annotations.push({ text: blocks > 1 ? "block " + block : "", showarrow: false, xanchor: "left",
      xref: "x" + suffix + " domain", yref: "y" + suffix + " domain", x: 0, y: 1.12 });
    for (const variant of cell.variants) {
      const curve = variant.curves[block];
      if (!curve) continue;
      const { color, dash } = look(variant.title);
      traces.push({ type: "scatter", mode: curve.length > 1 ? "lines" : "markers", name: plain(variant.title), legendgroup: variant.title,
        showlegend: block === 0, x: curve.map((_, i) => i + 1), y: curve,
        line: { color, dash, width: 1.8 }, marker: { color },
        xaxis: "x" + suffix, yaxis: "y" + suffix });
    }
  }
  draw("curves", traces, layout);
}

function drawMaps(cell) {
  const several = cell.variants.filter((variant) => variant.matrix.length > 1);
  const columns = Math.min(several.length, 4), rows = Math.ceil(several.length / (columns || 1));
  const layout = { grid: { rows, columns, pattern: "independent", ygap: 0.35 }, height: 270 * rows + 40, annotations: [] };
  const values = several.flatMap((variant) => variant.matrix.flat());
  const traces = several.map((variant, i) => {
    const suffix = i ? String(i + 1) : "";
    layout["xaxis" + suffix] = axis("tested on block", { dtick: 1 });
    layout["yaxis" + suffix] = axis(i % columns ? "" : "trained up to block", { dtick: 1, autorange: "reversed" });
    layout.annotations.push({ text: plain(variant.title), showarrow: false, xanchor: "left", x: 0, y: 1.15,
      xref: "x" + suffix + " domain", yref: "y" + suffix + " domain" });
    return { type: "heatmap", z: variant.matrix.map((row) => [...row, ...Array(variant.matrix.length - row.length).fill(null)]),
      texttemplate: "%{z:.3f}", hoverongaps: false, zmin: Math.min(...values), zmax: Math.max(...values),
      colorscale: "Cividis", showscale: i === 0, xaxis: "x" + suffix, yaxis: "y" + suffix };
  });
  draw("maps", traces, layout);
}

function drawPoints(id, values, x, y, titles, more) {
  const traces = [];
  const cells = data.cells.filter((cell) => shown(cell, values));
  const legend = new Set();
  for (const cell of cells) for (const variant of cell.variants) {
    if (x(variant, cell) === null || y(variant, cell) === null) continue;
    const { color, open } = look(variant.title);  // in the second turn of colours, symbols are open
    traces.push({ type: "scatter", mode: "markers", name: plain(variant.title), legendgroup: variant.title,
      showlegend: !legend.has(variant.title), x: [x(variant, cell)], y: [y(variant, cell)],
      marker: { color, size: 10, symbol: data.cells.indexOf(cell) % 30 + (open ? 100 : 0),
        line: { width: open ? 2 : 0 } },
      hovertemplate: plain(variant.title + " on " + cell.title) + "<br>%{x:.4~g}, %{y:.4f}<extra></extra>" });
    legend.add(variant.title);
  }
  draw(id, traces, { height: Math.min(Math.max(420, 30 * legend.size + 130), 900), xaxis: axis(titles[0], more), yaxis: axis(titles[1]) });
}

function drawDifferences(cell) {
  const several = cell.variants.filter((variant) => variant.counts.length);
  const columns = Math.min(several.length, 3), rows = Math.ceil(several.length / (columns || 1));
  const middle = data.edges.slice(1).map((edge, i) => (edge + data.edges[i]) / 2);
  const layout = { grid: { rows, columns, pattern: "independent", ygap: 0.4 }, height: 230 * rows + 40, annotations: [],
    showlegend: false, bargap: 0.05 };
  const most = Math.max(...several.map((variant) => variant.counts.reduce((a, b) => a + b, 0)));
  const traces = several.map((variant, i) => {
    const suffix = i ? String(i + 1) : "", users = variant.counts.reduce((a, b) => a + b, 0);
    layout["xaxis" + suffix] = axis("difference per user", { range: [-1, 1] });
    layout["yaxis" + suffix] = axis(i % columns ? "" : "share of users",
      { type: "log", dtick: 1, tickformat: "~%", range: [Math.log10(0.7 / most), Math.log10(1.5)] });
    layout.annotations.push({ text: plain(variant.title), showarrow: false, xanchor: "left", x: 0, y: 1.18,
      xref: "x" + suffix + " domain", yref: "y" + suffix + " domain" });
    return { type: "bar", x: middle, y: variant.counts.map((count) => count ? count / users : null),
      marker: { color: look(variant.title).color }, xaxis: "x" + suffix, yaxis: "y" + suffix };
  });
  draw("differences", traces, layout);
}

function drawAll() {
  const values = chosen();
  filterRows(values);
  if (typeof Plotly === "undefined") return;
  const cell = data.cells[Number(document.getElementById("cell").value)];
  const score = (variant) => variant.score;
  drawPoints("learning", values, (v) => v.learning, (v) => v.forgetting, ["learning: mean of R[t, t]", "forgetting"]);
  drawPoints("bytes", values, (v) => v.bytes / 1e6, score, ["megabytes sent, up and down", "average of the metric"], { type: "log" });
  drawPoints("seconds", values, (v) => v.seconds, score, ["seconds of the run", "average of the metric"], { type: "log" });
  if (!cell) return;
  drawCurves(cell);
  drawMaps(cell);
  drawDifferences(cell);
}

// The cells that the filters leave; the one chosen stays if it is among them, else that with most to compare is shown.
function refill() {
  const select = document.getElementById("cell"), before = select.value, values = chosen();
  select.textContent = "";
  const left = data.cells.map((cell, i) => [String(i), cell.title]).filter(([i]) => shown(data.cells[Number(i)], values));
  fillSelect(select, left);
  const variants = ([i]) => data.cells[Number(i)].variants.length;
  const most = left.reduce((best, each) => (best && variants(best) >= variants(each) ? best : each), null);
  if (left.length) select.value = left.some(([i]) => i === before) ? before : most[0];
  drawAll();
}

function start() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const name of FILTERS) {
    const select = document.getElementById("filter-" + name);
    fillSelect(select, [...new Set(data.cells.map((cell) => cell[name]))].map((value) => [value, value]), "all");
    if (wanted.has(name)) select.value = wanted.get(name);
    select.addEventListener("change", refill);
  }
  document.getElementById("cell").addEventListener("change", drawAll);
  for (const heading of document.querySelectorAll("#leaderboard thead th")) heading.addEventListener("click", () => sortBy(heading));
  refill();
}

// The library is kept compressed, as it is larger than the rest of the page. Tables work without it.
async function loadLibrary() {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

start();
loadLibrary().then(drawAll).then(() => document.body.setAttribute("data-drawn", "yes"),
  (error) => complain("Figures cannot be drawn in this browser: " + error));
