// The report: everything that is drawn is in this page, compressed; names in it are escaped.
async function start() {
  const DataTable = await dataTables();
  document.head.append(Object.assign(document.createElement("script"), { textContent: await unpack("plotly") }));
  const figures = JSON.parse(await unpack("figures")), begun = new Set();

  function begin(part) {  // a part is begun when it is first seen, as what is hidden has no size
    if (begun.has(part)) return;
    begun.add(part);
    for (const table of part.querySelectorAll("table"))
      new DataTable(table, table.id === "leaderboard" ? FILTERED : PLAIN);
    for (const place of part.querySelectorAll(".figure"))
      Plotly.newPlot(place, figures[place.id].data, figures[place.id].layout, { displaylogo: false, responsive: true });
  }
  const select = document.getElementById("cell"), parts = [...document.querySelectorAll("section[data-cell]")];
  function show() {
    for (const part of parts) part.hidden = part.dataset.cell !== select.value;
    parts.filter((part) => !part.hidden).forEach(begin);
  }
  select.addEventListener("change", show);
  document.querySelectorAll("section:not([data-cell])").forEach(begin);

  // What the leaderboard's filters leave is drawn, and can be chosen; first what has most variants to compare.
  const board = new DataTable("#leaderboard");
  function follow() {
    const left = board.rows({ search: "applied" }).nodes().toArray().map((row) => row.dataset);
    const rows = new Set(left.map(({ row }) => Number(row))), variants = {};
    for (const { cell } of left) variants[cell] = (variants[cell] ?? 0) + 1;
    for (const option of select.options) option.hidden = option.disabled = !(option.value in variants);
    if (!(select.value in variants))
      select.value = Object.keys(variants).reduce((a, b) => (variants[b] > (variants[a] ?? 0) ? b : a), "");
    for (const place of document.querySelectorAll("section:not([data-cell]) .figure")) {
      const visible = place.data.map(({ meta }) => rows.has(meta)), names = place.data.map(({ name }) => name);
      const first = names.map((name, i) => visible[i] && names.findIndex((n, j) => visible[j] && n === name) === i);
      Plotly.restyle(place, { visible, showlegend: first });
    }
    show();
  }
  for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
    board.columns(name + ":title").search(value, { exact: true });
  board.on("draw", follow).draw();
}

drawn(start());
