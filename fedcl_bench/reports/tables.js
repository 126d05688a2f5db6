"use strict";
// What is packed into a page, DataTables among it, and how its tables are drawn.
async function unpack(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function dataTables() {
  document.head.append(Object.assign(document.createElement("style"), { textContent: await unpack("tables-css") }));
  const source = new Blob([await unpack("tables-js")], { type: "text/javascript" });
  return (await import(URL.createObjectURL(source))).default;
}
const PLAIN = { paging: false, info: false, searching: false, order: [], scrollX: true };
const FILTERED = { ...PLAIN, searching: true, scrollY: "50vh", scrollCollapse: true, columnControl: [["searchList"]] };

function drawn(started) {
  started.then(() => document.body.setAttribute("data-drawn", "yes"), (error) =>
    document.getElementById("errors").textContent = "This page cannot be drawn in this browser: " + error);
}
